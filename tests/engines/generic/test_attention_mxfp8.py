"""The reference of float8 attention with a scale for each block of 32, against NumPy in float64."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cudnn_jax import pygraph
from cudnn_jax.engines import planning
from cudnn_jax.engines.generic import _attention_rows
from cudnn_jax.engines.target import CPU
from cudnn_jax.graph import GraphNotSupportedError
from support import float8

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
B, N, K = 2, 4, 2
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def up(size: int, grain: int) -> int:
    return -(-size // grain) * grain


def scales_of(dim: tuple[int, ...], axis: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """One scale for each block of 32 along an axis, spread over `dim`, and the buffer that holds them in tiles.

    The buffer, of (B, H, rows, blocks) or, along axis 2, (B, H, blocks, rows), has whole tiles of 128 rows x 4 blocks.
    """
    batch, heads, *plane = dim
    count, rows = -(-dim[axis] // 32), plane[3 - axis]
    scales = 2.0 ** rng.integers(-2, 3, (batch, heads, rows, count))
    size = up(rows, 128), up(count, 4)
    flat = np.zeros((batch, heads, size[0] * size[1]))
    for r in range(rows):
        for c in range(count):
            tile = r // 128 * (size[1] // 4) + c // 4
            flat[:, :, tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales[:, :, r, c]
    spread = np.repeat(scales, 32, axis=3)[..., : dim[axis]]
    turned = axis == 2
    return (spread.swapaxes(2, 3) if turned else spread), flat.reshape(batch, heads, *(size[::-1] if turned else size))


class Operands:
    """What is handed to a graph by port, and what it stands for."""

    def __init__(self, rng: np.random.Generator, kind: Any) -> None:
        self.rng, self.kind = rng, kind
        self.given: Arrays = {}
        self.meant: Arrays = {}

    def add(self, port: str, dim: tuple[int, ...], axis: int) -> None:
        values = float8.rounded(self.rng.standard_normal(dim), self.kind)
        spread, tiled = scales_of(dim, axis, self.rng)
        self.given |= {port: values.astype(self.kind), f"descale_{port}": tiled.astype(E8M0)}
        self.meant[port] = values * spread


def run(name: str, operands: Operands, turned: bool = False, **options: Any) -> Arrays:
    """The outputs by port, computed in float64."""
    graph = pygraph(io_data_type="float64", compute_data_type="float64")

    def tensor(port: str, array: Array) -> Any:
        stride = None
        if turned and port.startswith("descale_"):
            rows = array.shape[2] * array.shape[3]
            stride = (array.shape[1] * rows, rows, 1, array.shape[2])
        return graph.tensor(array.shape, stride, data_type=array.dtype.name, name=port)

    getattr(graph, name)(**{port: tensor(port, array) for port, array in operands.given.items()}, **options)
    made = graph.nodes[0].outputs
    for each in made.values():
        each.set_output(True)
    graph.freeze()
    places = {id(each): port for port, each in made.items()}
    arrays = []
    for each in graph.inputs:
        array = operands.given[each.name]
        if turned and each.name.startswith("descale_"):
            # The same memory, seen through strides that turn the last two axes.
            array = array.reshape(*array.shape[:2], array.shape[3], array.shape[2]).swapaxes(2, 3)
        arrays.append(array)
    with jax.enable_x64(True):
        results = jax.jit(planning.plan(graph, CPU, "xla").artifact.fn)(*map(jnp.asarray, arrays))
    return {places[id(each)]: np.asarray(array) for each, array in zip(graph.outputs, results, strict=True)}


def compare(made: Arrays, wanted: Arrays) -> None:
    assert made.keys() == wanted.keys()
    for port, array in made.items():
        tolerance = {"float32": 2e-7, "float64": 1e-11}[array.dtype.name]
        right = np.broadcast_to(wanted[port], array.shape)
        np.testing.assert_allclose(array, right, tolerance, tolerance * np.abs(right).max(), err_msg=port)


def softmax(logits: Array) -> tuple[Array, Array, Array]:
    """exp(logit - largest), its sums, and the logsumexp."""
    most = logits.max(-1, keepdims=True)
    powers = np.exp(logits - most)
    total = powers.sum(-1, keepdims=True)
    return powers, total, most + np.log(total)


@pytest.mark.parametrize("turned", [False, True])
def test_attention_with_block_scales(turned: bool, rng: np.random.Generator) -> None:
    """Keys fill two tiles by two, and values two along the sequence."""
    length, keys, d, dv = 40, 200, 160, 48
    operands = Operands(rng, float8.E5M2 if turned else float8.E4M3)
    for port, dim, axis in (("q", (B, N, length, d), 3), ("k", (B, K, keys, d), 3), ("v", (B, K, keys, dv), 2)):
        operands.add(port, dim, axis)
    options = {"attn_scale": 0.05, "use_causal_mask_bottom_right": True, "generate_stats": True}
    made = run("sdpa_mxfp8", operands, turned, **options)
    q, k, v = (operands.meant[port] for port in "qkv")
    k, v = (np.repeat(x, N // K, 1) for x in (k, v))
    seen = np.arange(keys) <= np.arange(length)[:, None] + keys - length
    powers, total, stats = softmax(np.where(seen, 0.05 * q @ k.swapaxes(2, 3), -np.inf))
    o = float8.rounded(16 * powers, operands.kind) / 16 @ v / total
    compare(made, {"O": o, "Stats": stats, "Amax_O": np.abs(o).max()})


def in_blocks(x: Array, axis: int) -> Array:
    """Rounded to float8_e4m3fn with a power of two for each block of 32, the least that brings it into range."""
    rounded = np.zeros_like(x)
    for start in range(0, x.shape[axis], 32):
        at = (slice(None),) * axis + (slice(start, start + 32),)
        most = np.abs(x[at]).max(axis, keepdims=True)
        power = 2.0 ** np.ceil(np.log2(np.where(most == 0, 1, most) / float8.largest(float8.E4M3)))
        rounded[at] = float8.rounded(x[at] / power) * power
    return rounded


def test_the_gradients_of_attention_with_block_scales(rng: np.random.Generator, monkeypatch) -> None:
    """Rows come in blocks of 32, of at most 50, whose bounds are those of the scales of the softmax's gradient."""
    length, keys, d, dv = 96, 72, 48, 80
    monkeypatch.setattr(_attention_rows, "_ENTRIES", 50 * B * N * keys)
    operands = Operands(rng, float8.E4M3)
    rows, columns = {"q": (B, N, length, d), "k": (B, K, keys, d)}, {"v": (B, K, keys, dv), "dO": (B, N, length, dv)}
    for port, dim in (rows | columns).items():
        operands.add(port, dim, 3)
    for port in ("q", "k", "dO"):
        operands.add(f"{port}_T", (rows | columns)[port], 2)
    wide = {port: rng.standard_normal((B, N, length, dv)) for port in ("o_f16", "dO_f16")}
    q, k, v, d_o, q_t, k_t, d_o_t = (operands.meant[port] for port in ("q", "k", "v", "dO", "q_T", "k_T", "dO_T"))
    k, v, k_t = (np.repeat(x, N // K, 1) for x in (k, v, k_t))
    seen = np.arange(keys) <= np.arange(length)[:, None]
    logits = np.where(seen, 0.05 * q @ k.swapaxes(2, 3), -np.inf)
    stats = softmax(logits)[2].astype(np.float32)
    operands.given |= wide | {"stats": stats}
    made = run("sdpa_mxfp8_backward", operands, attn_scale=0.05, use_causal_mask=True)
    p = np.exp(logits - stats.astype(np.float64))
    pull = (wide["o_f16"] * wide["dO_f16"]).sum(-1, keepdims=True)
    d_s = 0.05 * p * (d_o @ v.swapaxes(2, 3) - pull)
    gradients = {
        "dQ": in_blocks(d_s, 3) @ k_t,
        "dK": in_blocks(d_s, 2).swapaxes(2, 3) @ q_t,
        "dV": float8.rounded(256 * p).swapaxes(2, 3) / 256 @ d_o_t,
    }
    for port in ("dK", "dV"):
        gradients[port] = gradients[port].reshape(B, K, N // K, *gradients[port].shape[2:]).sum(2)
    compare(made, gradients | {f"amax_{port}": np.abs(each).max() for port, each in gradients.items()})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"descale_q": ((2, 4, 40, 4), None)}, "descale_q of dims (2, 4, 40, 4), serves whole tiles: (2, 4, 128, 4)"),
        (
            {"descale_k": ((2, 2, 128, 4), (512, 1024, 4, 1))},
            "descale_k of strides (512, 1024, 4, 1), serves (1024, 512, 4, 1) and (1024, 512, 1, 128)",
        ),
        (
            {"v": ((2, 2, 40, 160), None), "descale_v": ((2, 2, 4, 256), None)},
            "descale_v of 256 columns, serves one tile of 128: of several the order is unsure",
        ),
        ({"scale_o": ((1, 1, 1, 1), None)}, "scale_o (1, 1, 1, 1): serves none"),
        (
            {f"paged_attention_{side}_table": ((2, 1, 1, 1), None) for side in "kv"},
            "paged_attention_k_table: of pages with block scales serves none",
        ),
    ],
)
def test_scales_in_another_order_are_declined_by_name(changes: dict[str, Any], reason: str) -> None:
    graph = pygraph(io_data_type="float8_e4m3fn")
    tensors: dict[str, Any] = {port: ((2, 4 if port == "q" else 2, 40, 64), None) for port in "qkv"}
    tensors |= {"descale_q": ((2, 4, 128, 4), None), "descale_k": ((2, 2, 128, 4), None)}
    tensors |= {"descale_v": ((2, 2, 4, 128), None)}
    kinds = {"descale": "float8_e8m0fnu", "scale": "float32", "paged": "int32"}
    ports = {
        port: graph.tensor(*layout, data_type=kinds.get(port.split("_")[0], "float8_e4m3fn"))
        for port, layout in (tensors | changes).items()
    }
    graph.sdpa_mxfp8(**ports)[0].set_output(True)
    with pytest.raises(GraphNotSupportedError, match=re.escape(f"sdpa_mxfp8: {reason}\n")):
        planning.plan(graph, CPU)


def test_scales_of_another_type_are_declined_by_name() -> None:
    graph = pygraph(io_data_type="float8_e4m3fn")
    heads = [graph.tensor((2, 2, 40, 64)) for _ in "qkv"]
    graph.sdpa_mxfp8(*heads, *(graph.tensor((2, 2, 128, 4), data_type="float32") for _ in "qkv"))[0].set_output(True)
    with pytest.raises(GraphNotSupportedError, match="descale_q of type float32, serves float8_e8m0fnu\n"):
        planning.plan(graph, CPU)


def test_a_turned_operand_has_the_dims_of_the_other() -> None:
    graph = pygraph(io_data_type="float8_e4m3fn")
    eight = {port: graph.tensor((2, 2, 40, 64)) for port in ("q", "k", "k_T", "v", "dO", "dO_T")}
    wide = {port: graph.tensor((2, 2, 40, 64), data_type="bfloat16") for port in ("o_f16", "dO_f16")}
    scales = {
        f"descale_{port}": graph.tensor(
            (2, 2, 4, 128) if port.endswith("_T") else (2, 2, 128, 4), data_type="float8_e8m0fnu"
        )
        for port in ("q", "q_T", "k", "k_T", "v", "dO", "dO_T")
    }
    stats = graph.tensor((2, 2, 40, 1), data_type="float32")
    turned = graph.tensor((2, 2, 64, 40))
    graph.sdpa_mxfp8_backward(**eight, **wide, **scales, q_T=turned, stats=stats)[0].set_output(True)
    with pytest.raises(GraphNotSupportedError, match=r"q_T of dims \(2, 2, 64, 40\), serves \(2, 2, 40, 64\)\n"):
        planning.plan(graph, CPU)
