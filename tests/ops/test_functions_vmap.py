"""The functions over graphs of one node under `vmap`: against unrolled calls, and which graphs it makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax._sites import sites
from support.gradients import QUICK, close

V = 3
quantised = partial(cudnn_jax.block_scale_quantize, block_size=4)


def requantised(x: Any) -> Any:
    return cudnn_jax.block_scale_dequantize(*quantised(x), block_size=4)


CASES: list[tuple[str, Callable[..., Any], tuple[tuple[int, ...], ...], tuple[int | None, ...], int, bool]] = [
    ("rms_norm", cudnn_jax.rms_norm, ((4, V, 8), (8,), (8,)), (1, None, None), 1, True),
    ("rms_norm, gradients of weights", cudnn_jax.rms_norm, ((V, 4, 8), (8,), (8,)), (0, None, None), 3, False),
    ("rms_norm, weights", cudnn_jax.rms_norm, ((4, 8), (V, 8)), (None, 0), 2, False),
    ("layer_norm of a row", cudnn_jax.layer_norm, ((V, 8), (8,)), (0, None), 1, True),
    ("layer_norm over axis 0", partial(cudnn_jax.layer_norm, axis=0), ((V, 8, 2),), (0,), 1, True),
    ("rope, angles of all", cudnn_jax.rope, ((V, 2, 5, 8), (5, 4)), (0, None), 1, True),
    ("rope, angles of each", cudnn_jax.rope, ((V, 2, 5, 8), (V, 5, 4)), (0, 0), 1, True),
    ("rope of a row", cudnn_jax.rope, ((8,), (V, 4)), (None, 0), 1, True),
    ("conv", partial(cudnn_jax.conv, stride=2, padding=1), ((V, 2, 4, 9), (6, 2, 3)), (0, None), 1, True),
    (
        "conv, channels last",
        partial(cudnn_jax.conv, channels_last=True),
        ((2, 9, V, 4), (6, 3, 2)),
        (2, None),
        1,
        True,
    ),
    ("conv, weights", cudnn_jax.conv, ((2, 4, 9), (V, 6, 4, 3)), (None, 0), 2, False),
    ("quantise", requantised, ((V, 2, 6),), (0,), 1, True),
    ("quantise a row", requantised, ((V, 6),), (0,), 1, True),
    ("quantise along axis 0", lambda x: quantised(x, axis=0)[0].astype(jnp.float32), ((V, 6, 2),), (0,), 1, False),
]


@pytest.mark.parametrize(
    ("fn", "dims", "axes", "moving", "folds"), [row[1:] for row in CASES], ids=[r[0] for r in CASES]
)
def test_vmap_of_a_vjp_equals_a_loop(
    fn: Any, dims: Any, axes: Any, moving: int, folds: bool, rng: np.random.Generator
) -> None:
    """Also that nothing leaves the graphs where rows tell the elements apart."""
    arrays = [jnp.asarray(rng.standard_normal(dim), jnp.float32) for dim in dims]

    def pulled(cotangent: Any, *arrays: Any) -> Any:
        made, pull = jax.vjp(lambda *moved: fn(*moved, *arrays[moving:]), *arrays[:moving])
        return made, pull(cotangent)

    at = lambda x, axis, i: x if axis is None else jnp.take(x, i, axis)  # noqa: E731
    each = [[at(x, axis, i) for x, axis in zip(arrays, axes, strict=True)] for i in range(V)]
    cotangent = jnp.asarray(rng.standard_normal((V, *jax.eval_shape(fn, *each[0]).shape)), jnp.float32)
    mapped = jax.vmap(pulled, in_axes=(0, *axes))
    made = jax.jit(mapped, compiler_options=QUICK)(cotangent, *arrays)
    one = jax.jit(pulled, compiler_options=QUICK)
    for i in range(V):
        for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(one(cotangent[i], *each[i])), strict=True):
            close(x[i], y, 1e-5)
    told = cudnn_jax.explain(mapped, cotangent, *arrays)
    unmapped = cudnn_jax.explain(pulled, cotangent[0], *each[0])
    assert (len(told.rows) == len(unmapped.rows)) == folds


def test_gradients_of_a_mapped_function_and_nested_maps(rng: np.random.Generator) -> None:
    x, scale = (jnp.asarray(rng.standard_normal(dim), jnp.float32) for dim in ((2, V, 4, 8), (8,)))
    mapped = jax.vmap(jax.vmap(cudnn_jax.rms_norm, in_axes=(0, None)), in_axes=(0, None))

    def gradients(fn: Any) -> Any:
        return jax.jit(jax.grad(lambda *each: jnp.sin(fn(*each)).sum(), argnums=(0, 1)), compiler_options=QUICK)

    for made, expected in zip(gradients(mapped)(x, scale), gradients(cudnn_jax.rms_norm)(x, scale), strict=True):
        close(made, expected, 1e-5)
    told = cudnn_jax.explain(gradients(mapped), x, scale)
    assert [row["facts"] for row in told.rows] == [
        "rmsnorm fwd float32 (24, 8) over axes (1,) inv_var",
        "rmsnorm bwd float32 (24, 8) over axes (1,)",
    ]


def test_a_folded_graph_is_that_of_the_whole_array() -> None:
    x, images, weight = (jax.ShapeDtypeStruct(dim, jnp.bfloat16) for dim in ((V, 4, 8), (V, 2, 9, 4), (6, 3, 4)))
    conv = partial(cudnn_jax.conv, channels_last=True)
    for mapped, whole, arrays in (
        (jax.vmap(cudnn_jax.rms_norm), cudnn_jax.rms_norm, (x,)),
        (jax.vmap(conv, in_axes=(0, None)), lambda x, w: conv(x.reshape(-1, 9, 4), w), (images, weight)),
    ):
        (folded,), (plain,) = sites(mapped, *arrays), sites(whole, *arrays)
        assert folded.graph().hash() == plain.graph().hash()


def test_what_is_copied_is_told() -> None:
    x, angles = jnp.ones((2, 4, 8)), jnp.ones((V, 1, 4))
    (row,) = cudnn_jax.explain(jax.vmap(cudnn_jax.rope, in_axes=(None, 0)), x, angles).rows
    assert row["notes"] == [
        f"vmap copies x float32[2, 4, 8] to [{V}, 2, 4, 8]",
        f"vmap copies angles float32[1, 1, 4] to [{V}, 2, 1, 4]",
    ]


def test_a_named_implementation_folds_or_says_why_not() -> None:
    x, scale = jnp.ones((V, 4, 8)), jnp.ones((V, 8))
    named = partial(cudnn_jax.rms_norm, implementation="cutile")
    assert jax.eval_shape(jax.vmap(named, in_axes=(0, None)), x, scale[0]).shape == (V, 4, 8)
    words = "'cutile': rmsnorm reads scale whole, which differs between elements; implementation='xla' and None have"
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(jax.vmap(named), x, scale)
