"""The reference of float8 attention against NumPy in float64, which rounds to float8 where the operation does."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cudnn_jax import pygraph
from cudnn_jax.engines import planning
from cudnn_jax.engines.generic import _attention_rows
from cudnn_jax.engines.target import CPU
from cudnn_jax.graph import GraphNotSupportedError
from support import float8, operations

Arrays = float8.Arrays
E4M3, E5M2 = float8.E4M3, float8.E5M2
B, T, S, D, DV = 3, 7, 9, 16, 32
LENGTHS = {"q": np.array([4, 7, 3]), "kv": np.array([9, 8, 0])}


class Case(NamedTuple):
    """What is asked of attention.

    Attributes:
      options: keywords of both directions.
      sees: (row, key, true lengths of queries and of keys) -> whether the row sees the key.
      heads: of queries, and of keys.
      q, d_o: the types by which the softmax and its gradient are rounded; the other operands have the other one's.
      lengths: the ports that say the true lengths, but for their sides.
      ports: optional ports that are wired.
      scale_s: multiplies the softmax, of at most 1.
      fit: of float8 results, over a scale that fits.
    """

    options: Mapping[str, Any] = MappingProxyType({})
    sees: Callable[[int, int, int, int], bool] = lambda i, j, q, kv: True
    heads: tuple[int, int] = (4, 2)
    q: Any = E4M3
    d_o: Any = E4M3
    lengths: str = ""
    ports: tuple[str, ...] = ()
    scale_s: float = 300.0
    fit: float = 0.0

    @property
    def rows(self) -> np.ndarray[Any, Any]:
        """(B, T): those within the true lengths."""
        return np.arange(T) < (LENGTHS["q"] if self.lengths else np.full(B, T))[:, None]

    @property
    def keep(self) -> np.ndarray[Any, Any]:
        """(B, T, S)"""
        seen = np.zeros((B, T, S), bool)
        for b in range(B):
            q, kv = (int(side[b]) for side in LENGTHS.values()) if self.lengths else (T, S)
            for i in range(q):
                for j in range(kv):
                    seen[b, i, j] = self.sees(i, j, q, kv)
        return seen


CASES = {
    "plain": Case(),
    "causal, one key head, a wide range": Case(
        {"use_causal_mask": True}, lambda i, j, q, kv: j <= i, heads=(3, 1), q=E5M2, fit=1.0
    ),
    "causal to the bottom right, with lengths": Case(
        {"use_causal_mask_bottom_right": True, "use_padding_mask": True},
        lambda i, j, q, kv: j <= i + kv - q,
        lengths="seq_len",
    ),
    "bounds": Case(
        {"diagonal_alignment": "BOTTOM_RIGHT", "left_bound": 3, "right_bound": 1},
        lambda i, j, q, kv: i + kv - q - 3 < j <= i + kv - q + 1,
        d_o=E5M2,
        ports=("attn_scale",),
    ),
    "past the largest number": Case(scale_s=3e3, fit=64.0),
}
"""Of both directions."""
OWN = {
    "sliding window, bias, and starts for lengths": Case(
        {"use_padding_mask": True, "sliding_window": 2, "right_bound": 0},
        lambda i, j, q, kv: i - 2 < j <= i,
        lengths="cu_seq_len",
        ports=("bias",),
    )
}
"""The forward's alone."""


def number(rng: np.random.Generator) -> np.float64:
    return np.float64(np.float32(rng.uniform(0.5, 1.5)))


def drawn(case: Case, rng: np.random.Generator) -> Arrays:
    """Operands of the forward by port, in float64: numbers that their types hold."""
    heads, kv_heads = case.heads
    dims = {"q": (B, heads, T, D), "k": (B, kv_heads, S, D), "v": (B, kv_heads, S, DV)}
    given: Arrays = {name: float8.rounded(rng.standard_normal(dim), kind_of(case, name)) for name, dim in dims.items()}
    given |= {f"descale_{name}": number(rng) for name in "qkv"}
    given |= {"scale_s": np.float64(case.scale_s), "descale_s": np.float64(np.float32(number(rng) / case.scale_s))}
    optional = {"bias": rng.standard_normal((1, heads, 1, S)), "attn_scale": number(rng)}
    optional["sink_token"] = rng.standard_normal((1, heads, 1, 1)).astype(np.float32).astype(np.float64)
    return given | {name: optional[name] for name in case.ports} | {"scale_o": np.float64(1)}


def drawn_backward(case: Case, rng: np.random.Generator) -> Arrays:
    given = drawn(case, rng)
    made = float8.forward(given, keep=case.keep)
    d_o = float8.rounded(rng.standard_normal(made["O"].shape), case.d_o)
    given |= {"o": float8.rounded(made["O"], kind_of(case, "o")), "dO": d_o, "descale_o": np.float64(1)}
    given |= {"stats": made["Stats"].astype(np.float32).astype(np.float64), "descale_dO": number(rng)}
    given |= {name: np.float64(1) for name in ("scale_dQ", "scale_dK", "scale_dV", "scale_dP")}
    given["scale_dP"] = float8.fitting(float8.backward(given | {"descale_dP": 1}, keep=case.keep)["amax_dP"], case.d_o)
    return given | {"descale_dP": np.float64(np.float32(number(rng) / given["scale_dP"]))}


def kind_of(case: Case, port: str) -> Any:
    """float8 for the operands, float32 for scales and statistics."""
    kinds = {"q": case.q, "dO": case.d_o, "bias": np.dtype("float64")}
    kinds |= dict.fromkeys(("k", "v", "o"), E5M2 if case.q == E4M3 else E4M3)
    return kinds.get(port, np.dtype("float32"))


def rounding(kind: Any) -> float8.Inside:
    return lambda array: float8.rounded(array, kind)


def lengths_of(case: Case) -> Arrays:
    if not case.lengths:
        return {}
    sides = {f"{case.lengths}_{side}": lengths for side, lengths in LENGTHS.items()}
    if case.lengths == "cu_seq_len":
        sides = {port: np.append(0, np.cumsum(lengths)) for port, lengths in sides.items()}
    return {port: lengths.astype(np.int32).reshape(-1, 1, 1, 1) for port, lengths in sides.items()}


def poisoned(case: Case, given: Arrays) -> Arrays:
    """With NaN where no length reaches."""
    if not case.lengths:
        return given
    poison = dict(given)
    for port, side in (("q", "q"), ("o", "q"), ("dO", "q"), ("stats", "q"), ("k", "kv"), ("v", "kv")):
        for b, length in enumerate(LENGTHS[side]):
            if port in poison:
                poison[port] = poison[port].copy()
                poison[port][b, :, length:] = np.nan
    return poison


def pages_of(arrays: Arrays, port: str, page: int) -> Arrays:
    """A sequence's pages lie in falling order, those of all sequences next to each other."""
    batch, heads, length, width = arrays[port].shape
    count = length // page
    pages = arrays[port].reshape(batch, heads, count, page, width)[:, :, ::-1].transpose(2, 0, 1, 3, 4)
    table = np.arange(batch)[:, None] + batch * np.arange(count)[::-1]
    return {
        port: pages.reshape(count * batch, heads, page, width),
        f"paged_attention_{port}_table": table.astype(np.int32).reshape(batch, 1, count, 1),
    }


def run(
    name: str,
    case: Case,
    given: Arrays,
    narrow: tuple[str, ...] = (),
    asked: dict[str, tuple[int, ...]] | None = None,
    page: int = 0,
    **options: Any,
) -> Arrays:
    """The outputs by port, computed in float64: `narrow` ones in q's type; `asked` are those that a caller makes.

    Keys and values come in pages of `page` rows, if that is not 0.
    """
    graph = pygraph(io_data_type="float64", compute_data_type="float64")
    arrays = {
        port: np.asarray(array).reshape(np.shape(array) or (1, 1, 1, 1)).astype(kind_of(case, port))
        for port, array in poisoned(case, given).items()
    }
    arrays |= lengths_of(case)
    if page:
        arrays |= pages_of(arrays, "k", page) | pages_of(arrays, "v", page)
    ports = {port: graph.tensor(array.shape, data_type=array.dtype.name, name=port) for port, array in arrays.items()}
    ports |= {port: graph.tensor(dim, data_type="float32") for port, dim in (asked or {}).items()}
    getattr(graph, name)(**{"attn_scale": float8.ATTN_SCALE, **case.options, **options, **ports})
    made = graph.nodes[0].outputs
    for port, tensor in made.items():
        tensor.set_output(True)
        if port in narrow:
            tensor.set_data_type(case.q.name)
    graph.freeze()
    back = pygraph.from_json(graph.to_json())
    planned = planning.plan(back, CPU, "xla")
    assert planned.plan.engine_id == 21_999
    with jax.enable_x64(True):
        outputs = jax.jit(planned.artifact.fn)(*(jnp.asarray(arrays[tensor.name]) for tensor in back.inputs))
    places = {id(tensor): port for port, tensor in back.nodes[0].outputs.items()}
    return {places[id(tensor)]: np.asarray(array) for tensor, array in zip(back.outputs, outputs, strict=True)}


def compare(made: Arrays, wanted: Arrays) -> None:
    """float8 bit for bit, float32 to its last bit or two, float64 to what sums in another order differ by."""
    assert made.keys() == wanted.keys()
    for port, array in made.items():
        right = np.broadcast_to(wanted[port], array.shape)
        if array.dtype.itemsize == 1:
            np.testing.assert_array_equal(array.astype(np.float64), float8.rounded(right, array.dtype), port)
        else:
            tolerance = {"float32": 2e-7, "float64": 1e-11}[array.dtype.name]
            most = np.abs(right[np.isfinite(right)]).max(initial=0)
            np.testing.assert_allclose(array, right, tolerance, tolerance * most, err_msg=port)


@pytest.mark.parametrize("name", CASES | OWN)
def test_attention(name: str, rng: np.random.Generator) -> None:
    case = (CASES | OWN)[name]
    given = drawn(case, rng)
    inside = rounding(case.q)
    if case.fit:
        given["scale_o"] = case.fit * float8.fitting(float8.forward(given, inside, case.keep)["O"], case.q)
    wanted = float8.forward(given, inside, case.keep)
    made = run("sdpa_fp8", case, given, ("O",) if case.fit else (), generate_stats=True)
    compare(made, wanted)
    saturated = np.abs(made["O"].astype(np.float64)) == float8.largest(case.q)
    assert saturated.any() == (case.fit > 1)


@pytest.mark.parametrize("name", CASES)
def test_the_gradients_of_attention(name: str, rng: np.random.Generator) -> None:
    case = CASES[name]
    given = drawn_backward(case, rng)
    inside = {"inside": rounding(case.q), "inside_gradient": rounding(case.d_o), "keep": case.keep}
    gradients = ("dQ", "dK", "dV")
    if case.fit:
        most = float8.backward(given, **inside)
        given |= {f"scale_{port}": case.fit * float8.fitting(most[port], case.q) for port in gradients}
        given["scale_dP"] *= case.fit
    del given["scale_o"]
    made = run("sdpa_fp8_backward", case, given, gradients if case.fit else ())
    compare(made, float8.backward(given, **inside))


def test_a_sink_and_what_else_the_softmax_tells(rng: np.random.Generator) -> None:
    case = Case({"use_padding_mask": True}, lengths="seq_len", ports=("sink_token",))
    given = drawn_backward(case, rng)
    forward = {port: given[port] for port in drawn(case, rng)}
    (heads, _), inside = case.heads, rounding(case.q)
    asked = dict.fromkeys(("score_max", "score_sum_exp"), (B, heads, T, 1))
    made = run("sdpa_fp8", case, forward, asked=asked, generate_stats=True, stats_use_log2=True)
    wanted = float8.forward(forward, inside, case.keep, case.rows)
    k = np.repeat(np.where(case.keep.any(1)[:, None, :, None], given["k"], 0), 2, 1) * given["descale_k"]
    logits = float8.ATTN_SCALE * given["descale_q"] * given["q"] @ k.swapaxes(-1, -2)
    most = np.where(case.keep[:, None], logits, -np.inf).max(-1, keepdims=True)
    rows = case.rows[:, None, :, None]
    wanted["score_max"] = np.where(rows, np.maximum(most, given["sink_token"]), -np.inf)
    wanted["score_sum_exp"] = np.where(rows, np.exp(wanted["Stats"] - np.where(rows, wanted["score_max"], 0)), 0)
    wanted["Stats"] = wanted["Stats"] / np.log(2)
    compare(made, wanted)

    del given["scale_o"]
    made = run("sdpa_fp8_backward", case, given, asked={"dSink_token": (1, heads, 1, 1)})
    compare(made, float8.backward(given, inside, case.keep))


def test_slopes_pages_and_a_scale_that_q_holds(rng: np.random.Generator) -> None:
    case = Case(
        {"use_alibi_mask": True, "use_causal_mask": True, "use_padding_mask": True, "attn_scale_prefolded": True},
        lambda i, j, q, kv: j <= i,
        lengths="seq_len",
    )
    given, slopes = drawn(case, rng), 2.0 ** -np.array([2, 4, 6, 8]).reshape(1, 4, 1, 1)
    made = run("sdpa_fp8", case, given, page=3, attn_scale=None, paged_attention_max_seq_len_kv=S, generate_stats=True)
    bias = np.broadcast_to(slopes * (np.arange(S) - np.arange(T)[:, None]), (1, 4, T, S))
    compare(made, float8.forward(given | {"bias": bias, "attn_scale": np.log(2)}, rounding(case.q), case.keep))


def test_blocks_of_rows_make_what_all_rows_at_once_make(rng: np.random.Generator, monkeypatch) -> None:
    """The last block of three of 7 rows begins early, and rows that it repeats count once."""
    case = Case({"use_padding_mask": True}, lengths="seq_len")
    monkeypatch.setattr(_attention_rows, "_ENTRIES", 3 * B * case.heads[0] * S)
    given = drawn_backward(case, rng)
    inside = {"inside": rounding(case.q), "inside_gradient": rounding(case.d_o), "keep": case.keep}
    forward = {port: given[port] for port in drawn(case, rng)}
    compare(run("sdpa_fp8", case, forward), without_stats(float8.forward(forward, inside["inside"], case.keep)))
    del given["scale_o"]
    compare(run("sdpa_fp8_backward", case, given), float8.backward(given, **inside))


def test_without_keys_there_is_nothing() -> None:
    graph = pygraph(io_data_type="float8_e4m3fn")
    q, k, v = (graph.tensor((1, 2, length, 16)) for length in (3, 0, 0))
    scales = [graph.tensor((1, 1, 1, 1), data_type="float32") for _ in range(6)]
    for tensor in graph.sdpa_fp8(q, k, v, *scales, generate_stats=True):
        tensor.set_output(True)
    out, stats, *most = jax.jit(graph.as_jax())(
        *(jnp.ones(tensor.dim, tensor.data_type.value) for tensor in graph.inputs)
    )
    assert not out.astype(jnp.float32).any() and (stats == -jnp.inf).all() and not any(most)


def without_stats(made: Arrays) -> Arrays:
    return {port: array for port, array in made.items() if port != "Stats"}


@pytest.mark.parametrize(
    ("name", "draw", "compute"),
    [
        ("sdpa_fp8", float8.drawn, float8.forward),
        ("sdpa_fp8_backward", float8.drawn_backward, float8.backward),
    ],
)
def test_a_graph_as_a_function_computes_in_float32(name: str, draw: Any, compute: Any, rng) -> None:
    graph, given = operations.graph_of(name), draw(rng)
    (node,) = graph.nodes
    ports = {id(tensor): port for port, tensor in (*node.inputs.items(), *node.outputs.items())}
    arrays = [
        np.broadcast_to(given[ports[id(tensor)]], tensor.dim).astype(jnp.dtype(tensor.data_type.value))
        for tensor in graph.inputs
    ]
    wanted = compute(given, float8.rounded)
    made = jax.jit(graph.as_jax())(*map(jnp.asarray, arrays))
    for tensor, array in zip(graph.outputs, made, strict=True):
        port, narrow = ports[id(tensor)], tensor.data_type.itemsize_bits == 8
        right = float8.rounded(wanted[port]) if narrow else wanted[port]
        assert (array.shape, array.dtype.name) == (tensor.dim, tensor.data_type.value)
        error = np.linalg.norm(np.asarray(array, np.float64) - right) / np.linalg.norm(right)
        # What float32 sums otherwise is now and then the neighbour in float8.
        assert error < (2e-6 if port in ("Stats", "Amax_S", "amax_dP") else 3e-3), (port, error)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"dropout": (0.5, (1, 1, 1, 1), (1, 1, 1, 1))},
            "seed (1, 1, 1, 1), offset (1, 1, 1, 1), dropout 0.5: serves none",
        ),
        ({"rng_dump": (2, 4, 128, 128)}, "rng_dump (2, 4, 128, 128): serves none"),
        (
            {"attn_scale": 0.5, "attn_scale_prefolded": True},
            "attn_scale beside attn_scale_prefolded, which says that q holds it",
        ),
    ],
)
def test_what_the_reference_lacks_is_declined_by_name(options: dict[str, Any], reason: str) -> None:
    graph = pygraph(io_data_type="float8_e4m3fn")

    def wired(name: str, value: Any) -> Any:
        """Dims as a tensor."""
        if name == "dropout":
            return value[0], *(wired("", each) for each in value[1:])
        return graph.tensor(value, data_type="int32") if isinstance(value, tuple) else value

    attend(graph, **{name: wired(name, value) for name, value in options.items()})
    with pytest.raises(GraphNotSupportedError, match=re.escape(f"sdpa_fp8: {reason}\n")):
        planning.plan(graph, CPU)


def attend(graph: pygraph, scale: tuple[int, ...] = (1, 1, 1, 1), **options: Any) -> None:
    heads = [graph.tensor((2, 4, 128, 128)) for _ in range(3)]
    scales = [graph.tensor(dim, data_type="float32") for dim in (scale, *((1, 1, 1, 1),) * 5)]
    graph.sdpa_fp8(*heads, *scales, **options)[0].set_output(True)


def test_a_scale_of_several_numbers_is_declined_by_name() -> None:
    graph = pygraph(io_data_type="float8_e4m3fn")
    attend(graph, (1, 4, 1, 1))
    with pytest.raises(
        GraphNotSupportedError, match=r"sdpa_fp8: descale_q of dims \(1, 4, 1, 1\), serves one number\n"
    ):
        planning.plan(graph, CPU)


def test_operands_of_another_type_are_declined_by_name() -> None:
    graph = pygraph(io_data_type="bfloat16")
    attend(graph)
    with pytest.raises(GraphNotSupportedError, match="sdpa_fp8: q of type bfloat16, one of float8_e4m3fn, float8_e5m2"):
        planning.plan(graph, CPU)
