"""Tensors with ragged offsets: what the references read and write, against float64 NumPy."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax.engines import planning
from cudnn_jax.engines.target import CPU
from cudnn_jax.graph import GraphNotSupportedError, Tensor
from support.attention.harness import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, QUICK
from support.attention.options import attend, within
from support.attention.oracle import distance

B, N, NK, T, S, D, DV = 3, 4, 2, 7, 9, 8, 4
Q_LENGTHS, KV_LENGTHS = np.array([4, 0, 7]), np.array([9, 3, 5])
Q_STARTS, KV_STARTS = np.array([0, 6, 6, 13]), np.array([0, 9, 12, 17])
"""In rows. The first query has a gap of two rows behind it."""
SCALE = D**-0.5
NOISE = 1e3
"""In memory that belongs to no sequence."""

Array = np.ndarray[Any, Any]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def packed(padded: Array, lengths: Array, starts: Array, around: Any = 0) -> Array:
    """The sequences of (B, N, T, D) in memory (B * T, N, D), under the dims (B, N, T, D); `around` them a number, or
    noise where it is a generator.
    """
    b, n, t, d = padded.shape
    noisy = isinstance(around, np.random.Generator)
    memory = NOISE * around.standard_normal((b * t, n, d)) if noisy else np.full((b * t, n, d), float(around))
    for batch, (length, start) in enumerate(zip(lengths, starts, strict=False)):
        memory[start : start + length] = padded[batch, :, :length].swapaxes(0, 1)
    return memory.reshape(b, t, n, d).swapaxes(1, 2).astype(np.float32)


class Call:
    """A graph whose tensors lie as (B, T, N, D) in memory, packed, and the arrays of its inputs."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.graph = cudnn_jax.pygraph(io_data_type="float32")
        self.arrays: dict[int, Array] = {}
        self.sides = {"q": (Q_LENGTHS, Q_STARTS), "kv": (KV_LENGTHS, KV_STARTS)}
        self.offsets: dict[tuple[str, int], Tensor] = {}

    def dense(self, array: Array) -> Tensor:
        made = self.graph.tensor(array.shape, data_type=str(array.dtype))
        self.arrays[id(made)] = array
        return made

    def offset(self, side: str, row: int) -> Tensor:
        if (side, row) not in self.offsets:
            starts = self.sides[side][1] * row
            self.offsets[side, row] = self.dense(starts.astype(np.int32).reshape(-1, 1, 1, 1))
        return self.offsets[side, row]

    def ragged(self, padded: Array, side: str) -> Tensor:
        _, n, t, d = padded.shape
        made = self.graph.tensor(padded.shape, (t * n * d, d, n * d, 1), ragged_offset=self.offset(side, n * d))
        self.arrays[id(made)] = packed(padded, *self.sides[side], self.rng)
        return made

    def output(self, tensor: Tensor, side: str) -> Tensor:
        _, n, t, d = tensor.dim
        tensor.set_output(True).set_dim(tensor.dim).set_stride((t * n * d, d, n * d, 1))
        return tensor.set_ragged_offset(self.offset(side, n * d))

    def lengths(self) -> dict[str, Any]:
        given = {f"seq_len_{side}": self.dense(np.int32(x[0]).reshape(-1, 1, 1, 1)) for side, x in self.sides.items()}
        return {"use_padding_mask": True, **given}

    def given(self) -> list[Array]:
        return [self.arrays[id(tensor)] for tensor in self.graph.inputs]

    def run(self) -> dict[int, Array]:
        made = jax.jit(self.graph.as_jax(), compiler_options=QUICK)(*self.given())
        return {id(tensor): np.asarray(array) for tensor, array in zip(self.graph.outputs, made, strict=True)}


def draw(rng: np.random.Generator, *dims: tuple[int, ...]) -> list[Array]:
    return [rng.standard_normal(dim).astype(np.float32) for dim in dims]


ROWS = within(Q_LENGTHS, T)[:, None, :, None]
FORMULA = {"scale": SCALE, "keep": within(KV_LENGTHS, S)[:, None, None, :], "rows": ROWS}


def close(got: Array, want: Array, tolerance: float) -> None:
    assert distance(got, want) <= tolerance


@pytest.mark.parametrize("sides", ["q kv", "q", "kv"])
def test_attention_over_packed_sequences(sides: str, rng: np.random.Generator) -> None:
    """Each tensor may be ragged or not. What lies around the sequences is not read, and in results it is as rows without keys."""
    q, k, v, d_o = draw(rng, (B, N, T, D), (B, NK, S, D), (B, NK, S, DV), (B, N, T, DV))
    (sink,) = draw(rng, (1, N, 1, 1))
    want = attend(q, k, v, sink=sink, d_o=d_o, **FORMULA)
    as_side = {**dict.fromkeys(("q", "o", "dO", "stats", "O", "Stats", "dQ"), "q"), **dict.fromkeys("kv", "kv")}
    as_side |= {"dK": "kv", "dV": "kv"}

    def operand(call: Call, name: str, array: Array) -> Tensor:
        side = as_side[name]
        return call.ragged(array, side) if side in sides.split() else call.dense(array.astype(np.float32))

    def check(call: Call, made: dict[str, Tensor], tolerance: float) -> None:
        for name, tensor in made.items():
            if as_side[name] in sides.split():
                call.output(tensor, as_side[name])
            else:
                tensor.set_output(True)
        got = call.run()
        for name, tensor in made.items():
            array, truth = got[id(tensor)], want[name]
            if as_side[name] in sides.split():
                _, starts = call.sides[as_side[name]]
                truth = packed(truth, starts[1:] - starts[:-1], starts, -np.inf if name == "Stats" else 0)
            np.testing.assert_array_equal(np.isneginf(array), np.isneginf(truth))
            close(*(np.where(np.isneginf(x), 0, x) for x in (array, truth)), tolerance)

    call = Call(rng)
    ports = {name: operand(call, name, array) for name, array in (("q", q), ("k", k), ("v", v))}
    options = {"attn_scale": SCALE, "sink_token": call.dense(sink), **call.lengths()}
    o, stats = call.graph.sdpa(**ports, generate_stats=True, **options)
    check(call, {"O": o, "Stats": stats}, FORWARD_TOLERANCE["float32"])

    call = Call(rng)
    held = {"q": q, "k": k, "v": v, "o": want["O"], "dO": d_o, "stats": want["Stats"]}
    ports = {name: operand(call, name, array) for name, array in held.items()}
    options = {"attn_scale": SCALE, "sink_token": call.dense(sink), **call.lengths()}
    made = dict(zip(("dQ", "dK", "dV"), call.graph.sdpa_backward(**ports, **options), strict=True))
    check(call, made, GRADIENT_TOLERANCE["float32"])


def test_what_stands_around_attention_sees_padded_tensors(rng: np.random.Generator) -> None:
    """A gate on packed queries, a sum over what comes out, and a sum over packed keys."""
    q, k, v, gate = draw(rng, (B, N, T, D), (B, NK, S, D), (B, NK, S, D), (B, N, T, D))
    call = Call(rng)
    q_tensor, gate_tensor = call.ragged(q, "q"), call.ragged(gate, "q")
    k_tensor = call.ragged(k, "kv")
    o, _ = call.graph.sdpa(
        call.graph.mul(q_tensor, gate_tensor), k_tensor, call.dense(v), attn_scale=SCALE, **call.lengths()
    )
    keys = call.graph.reduction(k_tensor, mode="ADD").set_dim((B, NK, 1, D)).set_output(True)
    gated = call.graph.mul(o, gate_tensor)
    total = call.graph.reduction(gated, mode="ADD").set_dim((B, N, 1, D)).set_output(True)
    call.output(gated, "q")
    got = call.run()
    want = attend(q * gate, k, v, **FORMULA)["O"] * gate
    close(got[id(gated)], packed(want, Q_LENGTHS, Q_STARTS), FORWARD_TOLERANCE["float32"])
    close(got[id(total)], want.sum(axis=2, keepdims=True), FORWARD_TOLERANCE["float32"])
    close(got[id(keys)], (k * FORMULA["keep"].swapaxes(2, 3)).sum(2, keepdims=True), FORWARD_TOLERANCE["float32"])


def test_packed_page_tables(rng: np.random.Generator) -> None:
    page, pages = 4, 5
    pages_needed = -(-KV_LENGTHS // page)
    q, pool_k, pool_v = draw(rng, (B, N, T, D), (pages + 1, NK, page, D), (pages + 1, NK, page, DV))
    numbers = rng.permutation(pages + 1)[: pages_needed.sum()]
    starts = np.concatenate([[0], np.cumsum(pages_needed)])
    call = Call(rng)
    memory = np.full(B * 3, 2**30, np.int32)
    memory[: len(numbers)] = numbers
    table = call.dense(memory.reshape(B, 1, 3, 1))
    table.set_ragged_offset(call.dense(starts.astype(np.int32).reshape(-1, 1, 1, 1)))
    tables = {f"paged_attention_{side}_table": table for side in "kv"}
    o, _ = call.graph.sdpa(
        *map(call.dense, (q, pool_k, pool_v)),
        attn_scale=SCALE,
        paged_attention_max_seq_len_kv=S,
        **tables,
        **call.lengths(),
    )
    o.set_output(True)
    k, v = np.zeros((B, NK, 12, D)), np.zeros((B, NK, 12, DV))
    for batch in range(B):
        for at, number in enumerate(numbers[starts[batch] : starts[batch + 1]]):
            k[batch, :, at * page : (at + 1) * page] = pool_k[number]
            v[batch, :, at * page : (at + 1) * page] = pool_v[number]
    want = attend(q, k[:, :, :S], v[:, :, :S], **FORMULA)["O"]
    close(call.run()[id(o)], want, FORWARD_TOLERANCE["float32"])


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 2, 1), (0, 3, 1, 2)])
def test_rows_lie_at_the_tensors_strides(order: tuple[int, ...], rng: np.random.Generator) -> None:
    """Through a graph that changes nothing: the rows of each sequence, and zeros elsewhere."""
    b, n, t, d = dim = (2, 3, 4, 5)
    stride = tuple(int(np.prod([dim[axis] for axis in order[order.index(at) + 1 :]])) for at in range(4))
    rows = np.array([3, 2])
    starts = np.concatenate([[0], np.cumsum(rows)]) * stride[2]
    graph = cudnn_jax.pygraph(io_data_type="float32")
    offset = graph.tensor((b + 1, 1, 1, 1), data_type="int64" if order[1] == 2 else "int32")
    x = graph.tensor(dim, stride, ragged_offset=offset)
    y = graph.identity(x).set_output(True).set_dim(dim).set_stride(stride).set_ragged_offset(offset)
    assert y.ragged_offset is offset
    memory = rng.standard_normal(b * n * t * d).astype(np.float32)
    want = np.zeros_like(memory)
    for batch in range(b):
        for head, row, at in np.ndindex(n, rows[batch], d):
            where = starts[batch] + head * stride[1] + row * stride[2] + at * stride[3]
            if where < memory.size:
                want[where] = memory[where]

    def view(flat: Array) -> Array:
        return flat.reshape([dim[axis] for axis in order]).transpose(np.argsort(order))

    given = {id(x): view(memory), id(offset): starts.astype(offset.data_type.value).reshape(-1, 1, 1, 1)}
    out = np.full(memory.size, np.nan, np.float32)
    buffers = {tensor: given[id(tensor)] for tensor in graph.inputs}
    graph.create_execution_plans(target=CPU)
    graph.execute({**buffers, y: view(out)})
    np.testing.assert_array_equal(out, want)


def test_what_ragged_tensors_mean_nowhere_is_declined(rng: np.random.Generator) -> None:
    def ragged(graph: cudnn_jax.pygraph, dim: tuple[int, ...], stride: tuple[int, ...] | None = None) -> Tensor:
        offset = graph.tensor((dim[0] + 1, *(1,) * (len(dim) - 1)), data_type="int32")
        return graph.tensor(dim, stride, name="x", ragged_offset=offset)

    def attention(graph: cudnn_jax.pygraph) -> Tensor:
        return graph.sdpa(ragged(graph, (2, 1, 4, 8)), *(graph.tensor((2, 1, 4, 8)) for _ in "kv"))[0]

    for build, reason in (
        (lambda graph: graph.exp(ragged(graph, (2, 3, 4))), "ragged tensor 'x' of rank 3, serves rank 4"),
        (
            lambda graph: graph.exp(ragged(graph, (2, 3, 4, 5), (120, 40, 10, 2))),
            r"ragged tensor 'x' with strides \(120, 40, 10, 2\), serves strides without gaps",
        ),
        (attention, "sdpa: ragged q with use_padding_mask False, needs the sequences' lengths"),
        (lambda graph: graph.exp(attention(graph)), "sdpa: ragged q with use_padding_mask False"),
    ):
        graph = cudnn_jax.pygraph(io_data_type="float32")
        build(graph).set_output(True)
        with pytest.raises(GraphNotSupportedError, match=reason):
            planning.plan(graph, CPU)


# Gradients


def test_gradients_lie_as_their_inputs(rng: np.random.Generator) -> None:
    """Of packed queries and keys by way of other nodes, from a packed output and base-2 statistics."""
    q, k, v, gate, d_o = draw(rng, (B, N, T, D), (B, NK, S, D), (B, NK, S, D), (B, N, T, D), (B, N, T, D))
    (d_stats,) = draw(rng, (B, N, T, 1))
    call = Call(rng)
    tensors = {"q": call.ragged(q, "q"), "gate": call.ragged(gate, "q"), "k": call.ragged(k, "kv"), "v": call.dense(v)}
    o, stats = call.graph.sdpa(
        call.graph.mul(tensors["q"], tensors["gate"]),
        tensors["k"],
        tensors["v"],
        attn_scale=SCALE,
        generate_stats=True,
        stats_use_log2=True,
        **call.lengths(),
    )
    out = call.output(call.graph.mul(o, tensors["gate"]), "q")
    stats.set_output(True)
    moving = [at for at, tensor in enumerate(call.graph.inputs) if tensor in tensors.values()]
    arrays = call.given()

    def run(*moved: Any) -> list[Any]:
        given = list(arrays)
        for at, array in zip(moving, moved, strict=True):
            given[at] = array
        made = dict(zip(map(id, call.graph.outputs), call.graph.as_jax()(*given), strict=True))
        return [made[id(out)], made[id(stats)]]

    @jax.jit
    def gradients(moved: list[Array], cotangents: list[Array]) -> Any:
        return jax.vjp(run, *moved)[1](cotangents)

    got = gradients([arrays[at] for at in moving], [packed(d_o, Q_LENGTHS, Q_STARTS, rng), d_stats])
    named = {name: next(i for i, at in enumerate(moving) if call.graph.inputs[at] is x) for name, x in tensors.items()}

    want = attend(q * gate, k, v, d_o=d_o * gate, d_stats=d_stats * np.log2(np.e), **FORMULA)
    d_gate = np.where(ROWS, want["dQ"] * q + want["O"] * d_o, 0)
    sides = {"q": (want["dQ"] * gate, "q"), "gate": (d_gate, "q"), "k": (want["dK"], "kv")}
    for name, (truth, side) in sides.items():
        close(got[named[name]], packed(truth, *call.sides[side]), GRADIENT_TOLERANCE["float32"])
    close(got[named["v"]], want["dV"], GRADIENT_TOLERANCE["float32"])


def test_a_ragged_output_that_a_node_reads_has_no_derivative(rng: np.random.Generator) -> None:
    call = Call(rng)
    x = call.ragged(draw(rng, (B, N, T, D))[0], "q")
    y = call.output(call.graph.exp(x), "q").set_name("y")
    call.graph.reduction(y, mode="ADD").set_dim((1, 1, 1, 1)).set_output(True)
    arrays = call.given()
    with pytest.raises(NotImplementedError, match="the ragged output 'y', which a node reads, has no derivative"):
        jax.vjp(lambda x: call.graph.as_jax()(x, *arrays[1:]), arrays[0])
