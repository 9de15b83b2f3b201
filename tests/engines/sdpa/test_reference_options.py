"""What `sdpa` graphs ask for beyond `cudnn_jax.sdpa`: the reference engine against float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax.engines import ids, planning
from cudnn_jax.engines.sdpa import backend_limits, reference
from cudnn_jax.engines.sdpa.backend_mask import derive
from cudnn_jax.engines.sdpa.facts import analyze
from cudnn_jax.engines.target import CPU
from cudnn_jax.graph import OPERATIONS, GraphNotSupportedError, GraphValidationError, Tensor
from cudnn_jax.graph.operation import Operation
from support.attention.harness import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, QUICK
from support.attention.options import Answer, alibi, attend, within
from support.attention.oracle import distance

B, N, NK, T, S, D, DV = 2, 6, 2, 21, 37, 8, 12
SCALE = D**-0.5
Q_LENGTHS, KV_LENGTHS = np.array([21, 13]), np.array([29, 37])
TILES = (8, 16)
"""Several blocks on both sides."""

GIVEN = ("score_max", "score_sum_exp", "rng_dump", "dSink_token")
"""Outputs that the caller makes."""

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


class Number(NamedTuple):
    """A number of the graph's own."""

    value: float


class Made(NamedTuple):
    """An output that the caller makes."""

    dim: tuple[int, ...]


class Call:
    """A graph of one `sdpa` or `sdpa_backward`, and the arrays of its inputs."""

    def __init__(self, io: str = "float32") -> None:
        self.graph = cudnn_jax.pygraph(io_data_type=io)
        self.arrays: dict[int, Array] = {}

    def tensor(self, array: Array, **options: Any) -> Tensor:
        made = self.graph.tensor(array.shape, data_type=str(array.dtype), **options)
        self.arrays[id(made)] = array
        return made

    def operand(self, value: Any) -> Any:
        """A keyword's value: arrays become tensors."""
        if isinstance(value, Number):
            return self.graph.scalar(value.value, "float32")
        if isinstance(value, Made):
            return self.graph.tensor(value.dim, data_type="float32")
        if isinstance(value, tuple):
            return tuple(map(self.operand, value))
        return self.tensor(value) if isinstance(value, np.ndarray) else value

    def ask(self, results: Mapping[str, Tensor | None]) -> None:
        self.names = [name for name, tensor in results.items() if tensor is not None]
        self.outputs = [tensor for tensor in results.values() if tensor is not None]
        for tensor in self.outputs:
            tensor.set_output(True)

    def given(self) -> list[Array]:
        return [self.arrays[id(tensor)] for tensor in self.graph.inputs]

    def named(self, made: Any) -> Arrays:
        position = {id(tensor): at for at, tensor in enumerate(self.graph.outputs)}
        return {
            name: np.asarray(made[position[id(tensor)]]) for name, tensor in zip(self.names, self.outputs, strict=True)
        }

    def in_tiles(self, tiles: tuple[int, int] = TILES) -> Arrays:
        """By the engine's own function, in small tiles."""
        self.graph.freeze()
        facts = analyze(self.graph)
        assert not facts.unexplained
        make = reference.forward if facts.direction == "fwd" else reference.backward
        return self.named(jax.jit(make(facts, "cpu", tiles), compiler_options=QUICK)(*self.given()))

    def as_jax(self) -> Arrays:
        return self.named(jax.jit(self.graph.as_jax(), compiler_options=QUICK)(*self.given()))


def draw(rng: np.random.Generator, *dims: tuple[int, ...], kind: Any = np.float32) -> list[Array]:
    return [rng.standard_normal(dim).astype(kind) for dim in dims]


def qkv(rng: np.random.Generator, t: int = T, s: int = S) -> list[Array]:
    return draw(rng, (B, N, t, D), (B, NK, s, D), (B, NK, s, DV))


def forward(q: Array, k: Array, v: Array, **options: Any) -> Call:
    call = Call()
    options = {name: call.operand(value) for name, value in options.items()}
    o, stats = call.graph.sdpa(*map(call.tensor, (q, k, v)), generate_stats=True, **options)
    call.ask({"O": o, "Stats": stats, **{name: options.get(name) for name in GIVEN}})
    return call


def backward(q: Array, k: Array, v: Array, answer: Answer, d_o: Array, **options: Any) -> Call:
    call = Call()
    options = {name: call.operand(value) for name, value in options.items()}
    held = (q, k, v, answer["O"].astype(q.dtype), d_o, answer["Stats"].astype(np.float32))
    dq, dk, dv = call.graph.sdpa_backward(*map(call.tensor, held), **options)
    call.ask({"dQ": dq, "dK": dk, "dV": dv, **{name: options.get(name) for name in GIVEN}})
    return call


def check(got: Arrays, want: Answer, kind: str = "float32") -> None:
    for name, array in got.items():
        truth, tolerance = want[name], GRADIENT_TOLERANCE if name.startswith("d") else FORWARD_TOLERANCE
        array = array.astype(np.float64)
        assert array.shape == truth.shape, name
        np.testing.assert_array_equal(np.isneginf(array), np.isneginf(truth), err_msg=name)
        array, truth = (np.where(np.isneginf(x), 0, x) for x in (array, truth))
        error = distance(array, truth)
        assert error <= tolerance[kind], f"{name} is off by {error:.3g}, allowed {tolerance[kind]:.3g}"


def int32(values: Array) -> Array:
    return np.asarray(values, np.int32).reshape(-1, 1, 1, 1)


LENGTHS = {"use_padding_mask": True, "seq_len_q": int32(Q_LENGTHS), "seq_len_kv": int32(KV_LENGTHS)}
ROWS = within(Q_LENGTHS, T)[:, None, :, None]
KEYS = within(KV_LENGTHS, S)[:, None, None, :]
CAUSAL = np.tril(np.ones((T, S), bool))

Options = Callable[[np.random.Generator], tuple[dict[str, Any], dict[str, Any]]]
"""Random numbers -> (the operation's keywords, those of the oracle)."""


def a_sink(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    (sink,) = draw(rng, (1, N, 1, 1))
    return {"attn_scale": SCALE, "sink_token": sink}, {"scale": SCALE, "sink": sink}


def a_sink_under_lengths(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first rows of the first sequence see no key, and one head's sink is none."""
    (sink,) = draw(rng, (1, N, 1, 1))
    sink[0, 1] = -np.inf
    ends = np.array([9, 37])
    shift = (ends - Q_LENGTHS)[:, None, None, None]
    seen = within(ends, S)[:, None, None, :] & (np.arange(S) <= np.arange(T)[:, None] + shift)
    assert not seen[0, 0, :12].any()
    keywords = {"attn_scale": SCALE, "sink_token": sink, "use_causal_mask_bottom_right": True, **LENGTHS}
    return keywords | {"seq_len_kv": int32(ends)}, {"scale": SCALE, "sink": sink, "keep": seen, "rows": ROWS}


def slopes_and_a_scale_tensor(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    scale = np.full((1, 1, 1, 1), 0.37, np.float32)
    keywords = {"attn_scale": scale, "use_alibi_mask": True, "diagonal_band_right_bound": 0}
    return keywords, {"scale": float(scale.item()), "added": alibi(N, T, S), "keep": CAUSAL}


def numbers(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ports that take numbers of the graph's own."""
    mask = (rng.random((B, N, T, S)) < 0.8).astype(np.float32)
    keywords = {"attn_scale": Number(0.25), "bias": Number(3.0), "dropout": (mask, Number(1.25))}
    return keywords, {"scale": 0.25, "added": 3.0, "weight": 1.25 * mask}


def dropout_of_the_callers(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """The mask is NaN where a length says that there is nothing."""
    mask = (rng.random((B, 1, T, S)) < 0.6).astype(np.float32)
    poisoned = np.where(ROWS & KEYS, mask, np.nan).astype(np.float32)
    scale = np.full((1, 1, 1, 1), 1 / 0.6, np.float32)
    keywords = {"dropout": (poisoned, scale), "attn_scale": SCALE, **LENGTHS}
    return keywords, {"scale": SCALE, "weight": scale * mask, "keep": KEYS, "rows": ROWS}


def what_changes_nothing(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """A dropout that drops nothing, whose dump is ones, and hints."""
    seed = np.full((1, 1, 1, 1), 7, np.int32)
    keywords = {"dropout": (0.0, seed, seed), "rng_dump": Made((B, N, T, S)), "softmax_precision": "HALF"}
    keywords |= {"max_total_seq_len_q": 50, "max_total_seq_len_kv": 70, **LENGTHS}
    return keywords, {"keep": KEYS, "rows": ROWS}


def folded_scale(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """q holds the scale and log2(e)."""
    return {"attn_scale_prefolded": True}, {"scale": np.log(2.0)}


BOTH = [
    a_sink,
    a_sink_under_lengths,
    slopes_and_a_scale_tensor,
    numbers,
    dropout_of_the_callers,
    what_changes_nothing,
    folded_scale,
]


@pytest.mark.parametrize("options", BOTH, ids=lambda options: options.__name__)
def test_an_option_in_both_directions(options: Options, rng: np.random.Generator) -> None:
    q, k, v = qkv(rng)
    d_o, d_stats = draw(rng, (B, N, T, DV), (B, N, T, 1))
    keywords, formula = options(rng)
    want = attend(q, k, v, **formula, d_o=d_o, d_stats=d_stats)
    scores = {name: Made((B, N, T, 1)) for name in ("score_max", "score_sum_exp")}
    check(forward(q, k, v, **keywords, **scores).in_tiles(), want)
    sink = {"dSink_token": Made((1, N, 1, 1))} if "sink_token" in keywords else {}
    check(backward(q, k, v, want, d_o, dStats=d_stats, **keywords, **sink).in_tiles(), want)


def test_the_dropout_says_one_over_its_scale(rng: np.random.Generator) -> None:
    """And in the backward that is what counts; a scale for an inverse that is none tells them apart."""
    q, k, v = qkv(rng)
    (d_o,) = draw(rng, (B, N, T, DV))
    mask = (rng.random((1, N, T, S)) < 0.5).astype(np.float32)
    scale, inverse = (np.full((1, 1, 1, 1), x, np.float32) for x in (2.0, 0.5))
    want = attend(q, k, v, scale=SCALE, weight=2 * mask, d_o=d_o)
    check(backward(q, k, v, want, d_o, attn_scale=SCALE, dropout=(mask, scale, inverse)).in_tiles(), want)
    halved = backward(q, k, v, want, d_o, attn_scale=SCALE, dropout=(mask, scale, inverse * 0)).in_tiles()
    free = attend(q, k, v, scale=SCALE, weight=2 * mask, d_o=d_o, d_stats=(want["O"] * d_o).sum(-1, keepdims=True))
    check({"dQ": halved["dQ"], "dV": halved["dV"]}, free)


# Of the forward alone


def test_bits_of_a_block_mask_are_tiles_of_128(rng: np.random.Generator) -> None:
    t, s = 150, 1100
    q, k, v = (x.reshape(1, -1, *x.shape[2:])[:, :heads] for x, heads in zip(qkv(rng, t, s), (4, 2, 2), strict=True))
    bits = rng.random((1, 4, 2, 16)) < 0.5
    packed = np.packbits(bits, axis=-1, bitorder="little")
    tiles = bits.repeat(128, axis=2).repeat(128, axis=3)[:, :, :t, :s]
    want = attend(q, k, v, scale=SCALE, keep=tiles)
    for kind in (np.uint8, np.int8):
        call = forward(q, k, v, attn_scale=SCALE, block_mask=packed.view(kind))
        check(call.in_tiles((64, 160)), want)
    call = forward(q, k, v, attn_scale=SCALE, block_mask=packed[..., :1])
    with pytest.raises(
        GraphNotSupportedError, match=r"block_mask \(1, 4, 2, 1\), serves \(1, 4, 2, 2\): a bit for each"
    ):
        planning.plan(call.graph, CPU)


@pytest.mark.parametrize("paged", ["kv", "k"])
def test_keys_in_pages(paged: str, rng: np.random.Generator) -> None:
    """Behind a sequence's end the table holds anything, and what is in its pages does not count. Any number but 0 in a
    mask keeps.
    """
    q, k, v = qkv(rng)
    page, count = 8, 5
    mask = rng.random((B, 1, 1, S)) < 0.8
    keywords: dict[str, Any] = {"paged_attention_max_seq_len_kv": S, "kv_mask": mask * np.int8(2)}
    operands = {"k": k, "v": v}
    for side in paged:
        whole = np.pad(operands[side], ((0, 0), (0, 0), (0, page * count - S), (0, 0)), constant_values=np.nan)
        pages = whole.reshape(B, NK, count, page, -1).swapaxes(1, 2).reshape(B * count, NK, page, -1)
        order = rng.permutation(B * count)
        table = np.argsort(order).reshape(B, 1, count, 1).astype(np.int32)
        table[0, 0, 4] = -1  # 29 keys are in 4 pages
        operands[side] = pages[order]
        keywords[f"paged_attention_{side}_table"] = table
    starts = {"cu_seq_len_q": int32([0, *np.cumsum(Q_LENGTHS)]), "seq_len_kv": int32(KV_LENGTHS)}
    call = forward(q, **operands, attn_scale=SCALE, use_padding_mask=True, **starts, **keywords)
    check(call.in_tiles(), attend(q, k, v, scale=SCALE, keep=KEYS & mask, rows=ROWS))


def test_pages_without_a_bound_hold_all_that_tables_tell(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, s=32)
    pages = {
        port: x.reshape(B, NK, 4, 8, -1).swapaxes(1, 2).reshape(B * 4, NK, 8, -1)
        for port, x in {"k": k, "v": v}.items()
    }
    table = np.arange(B * 4, dtype=np.int32).reshape(B, 1, 4, 1)
    tables = {f"paged_attention_{side}_table": table for side in "kv"}
    check(forward(q, **pages, **tables).in_tiles(), attend(q, k, v))
    call = forward(q, **pages, **tables, paged_attention_max_seq_len_kv=33)
    with pytest.raises(GraphNotSupportedError, match="length 33 of k in pages, where paged_attention_k_table holds 32"):
        planning.plan(call.graph, CPU)


def test_stats_in_base_2(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng)
    got = forward(q, k, v, attn_scale=SCALE, stats_use_log2=True, unfuse_fma=True, implementation="UNIFIED").in_tiles()
    got["Stats"] = got["Stats"] * np.log(2).astype(np.float32)
    check(got, attend(q, k, v, scale=SCALE))


def test_no_keys_but_a_sink(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng, s=0)
    (sink,) = draw(rng, (1, N, 1, 1))
    given = {"use_padding_mask": True, "seq_len_q": int32(Q_LENGTHS), "seq_len_kv": int32([0, 0])}
    scores = {name: Made((B, N, T, 1)) for name in ("score_max", "score_sum_exp")}
    call = forward(q, k, v, sink_token=sink, **given, **scores)
    check(call.in_tiles(), attend(q, k, v, sink=sink, rows=ROWS))


# Types


def test_a_sink_is_the_logsumexp_of_rows_without_keys(rng: np.random.Generator) -> None:
    graph = cudnn_jax.pygraph(io_data_type="float32")
    q, k, v = (graph.tensor((B, N, length, D)) for length in (T, 0, 0))
    sink = graph.tensor((1, N, 1, 1))
    for made in graph.sdpa(q, k, v, sink_token=sink, generate_stats=True):
        made.set_output(True)
    d_stats = rng.standard_normal((B, N, T, 1)).astype(np.float32)
    given = [jnp.zeros(tensor.dim, jnp.float32) for tensor in (q, k, v)]
    got = jax.grad(lambda sink: (graph.as_jax()(*given, sink)[1] * d_stats).sum())(jnp.zeros(sink.dim, jnp.float32))
    np.testing.assert_allclose(got, d_stats.sum((0, 2), keepdims=True), rtol=1e-5, atol=1e-6)


def test_types_that_differ(rng: np.random.Generator) -> None:
    """Products are in the wider type, results in their own."""
    q, k, v = qkv(rng)
    (d_o,) = draw(rng, (B, N, T, DV))
    k = k.astype(ml_dtypes.float8_e4m3fn)
    v = v.astype(ml_dtypes.bfloat16)
    want = attend(q, k, v, scale=SCALE, d_o=d_o)
    call = forward(q, k, v, attn_scale=SCALE)
    call.outputs[0].set_data_type("float32")
    check(call.as_jax(), want)
    call = backward(q, k, v, want, d_o, attn_scale=SCALE)
    for gradient in call.outputs:
        gradient.set_data_type("float32")
    check(call.as_jax(), want)
    call = forward(*(x.astype(ml_dtypes.bfloat16) for x in (q, k, v)), attn_scale=SCALE)
    call.outputs[0].set_data_type("float32")
    got = call.as_jax()
    assert got["O"].dtype == np.float32
    assert (got["O"].view(np.uint32) & 0xFFFF).any(), "rounded to bfloat16 on its way"


# Which engines take them


def zeros(*dim: int, kind: str = "float32") -> Array:
    return np.zeros(dim, kind)


ONE = (1, 1, 1, 1)
STARTS = {f"cu_seq_len_{side}": zeros(B + 1, 1, 1, 1, kind="int32") for side in ("q", "kv")}
PAGES = {side: zeros(9, NK, 8, width) for side, width in (("k", D), ("v", DV))}
TABLES = {f"paged_attention_{side}_table": zeros(B, 1, 5, 1, kind="int32") for side in "kv"}
PAGED = {**PAGES, **TABLES, "paged_attention_max_seq_len_kv": S}
DRAWN = {"dropout": (0.0, zeros(*ONE, kind="int64"), zeros(*ONE, kind="int64"))}
MASKED = (zeros(B, 1, T, S), zeros(*ONE))
SINK = {"sink_token": zeros(1, N, 1, 1)}
EVERY: dict[str, dict[str, Any]] = {
    "attn_scale": {"attn_scale": zeros(*ONE)},
    "bias": {"bias": zeros(1, N, T, S)},
    "block_mask": {"block_mask": zeros(B, 1, 1, 1, kind="uint8")},
    "kv_mask": {"kv_mask": zeros(B, 1, 1, S)},
    **dict.fromkeys(("use_padding_mask", "seq_len_q", "seq_len_kv"), LENGTHS),
    **{key: {"use_padding_mask": True, **STARTS} for key in STARTS},
    **dict.fromkeys((*TABLES, "paged_attention_max_seq_len_kv"), PAGED),
    "sink_token": SINK,
    "dSink_token": {**SINK, "dSink_token": Made((1, N, 1, 1))},
    "dBias": {"bias": zeros(1, N, T, S), "dBias": Made((1, N, T, S))},
    "dStats": {"dStats": zeros(B, N, T, 1)},
    **dict.fromkeys(("dropout", "seed", "offset"), DRAWN),
    "rng_dump": {**DRAWN, "rng_dump": Made((B, N, T, S))},
    **{key: {"dropout": MASKED} for key in ("dropout_mask", "dropout_scale")},
    "dropout_scale_inv": {"dropout": (*MASKED, zeros(*ONE))},
    "score_max": {"score_max": Made((B, N, T, 1))},
    "score_sum_exp": {"score_sum_exp": Made((B, N, T, 1))},
    "is_inference": {"is_inference": False},
    "generate_stats": {"generate_stats": True},
    "use_alibi_mask": {"use_alibi_mask": True},
    "use_causal_mask": {"use_causal_mask": True},
    "use_causal_mask_bottom_right": {"use_causal_mask_bottom_right": True},
    "sliding_window_length": {"sliding_window_length": 3},
    "diagonal_alignment": {"diagonal_alignment": "BOTTOM_RIGHT"},
    "diagonal_band_left_bound": {"diagonal_band_left_bound": 3},
    "diagonal_band_right_bound": {"diagonal_band_right_bound": 3},
    "max_total_seq_len_q": {"max_total_seq_len_q": 9, **LENGTHS},
    "max_total_seq_len_kv": {"max_total_seq_len_kv": 9, **LENGTHS},
    "implementation": {"implementation": "COMPOSITE"},
    "unfuse_fma": {"unfuse_fma": True},
    "stats_use_log2": {"stats_use_log2": True},
    "softmax_precision": {"softmax_precision": "HALF"},
    "attn_scale_prefolded": {"attn_scale_prefolded": True},
    "use_deterministic_algorithm": {"use_deterministic_algorithm": True},
}
REFUSED_BY_THE_BUILDER = {"score_mod", "score_mod_bprop"}
PORTS = {"q": (B, N, T, D), "k": (B, NK, S, D), "v": (B, NK, S, DV), "o": (B, N, T, DV), "dO": (B, N, T, DV)}
PORTS |= {"stats": (B, N, T, 1)}


@pytest.mark.parametrize("operation", [OPERATIONS["sdpa"], OPERATIONS["sdpa_backward"]], ids=lambda each: each.name)
def test_every_option_of_the_table_has_a_plan_without_a_gpu(operation: Operation) -> None:
    ports = [port for port in operation.inputs if not port.optional]
    named = {port.name for port in operation.inputs if port.optional} | {each.name for each in operation.attributes}
    named |= {output.name for output in operation.outputs if output.from_caller}
    assert named - REFUSED_BY_THE_BUILDER <= EVERY.keys()
    for option in sorted(named - REFUSED_BY_THE_BUILDER):
        call = Call()
        keywords = {**{port.name: zeros(*PORTS[port.name]) for port in ports}, **EVERY[option]}
        keywords = {name: call.operand(value) for name, value in keywords.items()}
        for made in getattr(call.graph, operation.name)(**keywords):
            if made is not None:
                made.set_output(True)
        (node,) = call.graph.nodes
        spelled = "generate_stats" if option == "is_inference" else option
        assert spelled in {*node.inputs, *node.params, *node.outputs}
        planned = planning.plan(call.graph, CPU).plan
        assert planned.engine_id == ids.engine_id(planned_family(operation), ids.REFERENCE_SLOT), option


def planned_family(operation: Operation) -> str:
    return {"sdpa": "sdpa_fwd", "sdpa_backward": "sdpa_bwd"}[operation.name]


def test_options_are_told_to_other_engines(rng: np.random.Generator) -> None:
    """What is derived for cuDNN of a mask knows none of them: such a graph is left as it is."""
    q, k, v = qkv(rng)
    kept = rng.random((B, 1, 1, S)) < 0.5
    for options, told in (
        ({}, ()),
        ({"use_alibi_mask": True}, ("use_alibi_mask",)),
        ({"sink_token": draw(rng, (1, N, 1, 1))[0]}, ("sink_token",)),
        ({"score_max": Made((B, N, T, 1))}, ("score_max",)),
        ({"attn_scale": Number(0.5)}, ("attn_scale",)),
    ):
        call = Call()
        zero, dropped = (call.graph.scalar(x, "float32") for x in (0.0, float("-inf")))
        options = {name: call.operand(value) for name, value in options.items()}
        bias = call.graph.binary_select(zero, dropped, call.tensor(kept))
        call.graph.sdpa(*map(call.tensor, (q, k, v)), bias=bias, **options)[0].set_output(True)
        call.graph.freeze()
        facts = analyze(call.graph)
        assert (facts.options, facts.unexplained) == (told, ())
        assert (derive(call.graph, facts) is None) == bool(told)
        assert all(word in facts.describe() for word in told)


def test_a_selection_that_is_an_output_too_is_run_node_by_node(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng)
    kept = rng.random((B, 1, T, S)) < 0.8
    call = Call()
    zero, dropped = (call.graph.scalar(x, "float32") for x in (0.0, float("-inf")))
    bias = call.graph.binary_select(zero, dropped, call.tensor(kept)).set_dim(kept.shape).set_data_type("float32")
    o, _ = call.graph.sdpa(*map(call.tensor, (q, k, v)), bias=bias)
    call.ask({"O": o, "bias": bias})
    got = call.as_jax()
    np.testing.assert_array_equal(got.pop("bias"), np.where(kept, 0, -np.inf))
    check(got, attend(q, k, v, keep=kept))


def test_the_older_keyword_aligns_the_diagonal_too(rng: np.random.Generator) -> None:
    call = forward(*qkv(rng), use_causal_mask=True, diagonal_alignment="BOTTOM_RIGHT")
    assert analyze(call.graph).causal == "top_left"


def test_what_lies_in_no_sequence_is_written_before_cudnn_runs(rng: np.random.Generator) -> None:
    """Also over dQ, which cuDNN writes whole where sequences are not packed."""
    q, k, v = qkv(rng)
    want, d_o = attend(q, k, v), draw(rng, (B, N, T, DV))[0]
    for packed in (False, True):
        call = backward(q, k, v, want, d_o, **LENGTHS)
        if packed:
            starts = call.tensor(zeros(B + 1, 1, 1, 1, kind="int32"))
            call.outputs[0].set_ragged_offset(starts)
        facts = analyze(call.graph)
        assert facts.ragged == packed
        words = {name: backend_limits.prefill(facts).get(at) for name, at in facts.results.items()}
        assert words == {"dQ": 0 if packed else None, "dK": 0, "dV": 0}
    facts = analyze(forward(q, k, v, **LENGTHS).graph)
    words = {name: backend_limits.prefill(facts).get(at) for name, at in facts.results.items()}
    assert words == {"O": 0, "Stats": backend_limits.MINUS_INFINITY}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout": (0.25, np.zeros((1,) * 4, np.int32), np.zeros((1,) * 4, np.int32))}, "dropout 0.25, whose random"),
        ({"rng_dump": Made((B, N, T, S))}, "output rng_dump, the random numbers of cuDNN's kernels"),
        ({"attn_scale_prefolded": True, "attn_scale": 0.5}, "attn_scale beside attn_scale_prefolded"),
    ],
)
def test_what_has_no_formula_is_declined_in_one_line(options, reason, rng: np.random.Generator) -> None:
    call = forward(*qkv(rng), **options)
    with pytest.raises(GraphNotSupportedError, match=reason):
        planning.plan(call.graph, CPU)


def test_lengths_come_in_one_spelling(rng: np.random.Generator) -> None:
    starts = int32([0, *np.cumsum(Q_LENGTHS)])
    with pytest.raises(GraphValidationError, match="cu_seq_len_q came with seq_len_q; the rule: one of the two"):
        forward(*qkv(rng), cu_seq_len_q=starts, **LENGTHS)
