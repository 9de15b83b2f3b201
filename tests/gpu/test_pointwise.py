"""Pointwise graphs on a GPU: the bias-GELU kernel in every type, option and setting, and cuDNN's plans of every mode.

Answers are compared with float64, and outputs are NaN before each program runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax.engines import manifest, planning
from cudnn_jax.engines.execution import target_of
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.pointwise import samples
from cudnn_jax.graph import GraphNotSupportedError
from gpu.pointwise_programs import ENGINE, OPTIONS, SETTING_SHAPES, SHAPES, TAILS, WIDE, setting_names
from gpu.poison import poisoned_outputs
from support.pointwise import CASES, draw, expected, graph_of_one

erfc = np.vectorize(math.erfc, otypes=[np.float64])

ERROR = {"bfloat16": (2**-7, 2**-9), "float16": (2**-10, 2**-12), "float32": (2e-6, 2e-6)}
"""Relative, and absolute where terms cancel."""


CANCELS: dict[str, Any] = {"tan": lambda y: 4e-7 * (1 + y**2), "tanh_backward": lambda y: 1e-4}
"""Absolute errors that float32 cannot avoid: near the poles, and where 1 - tanh^2 loses its digits."""


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with poisoned_outputs(monkeypatch):
        yield


def gelu(h: np.ndarray, approximation: str) -> np.ndarray:
    if approximation == "erf":
        return 0.5 * h * erfc(-h / math.sqrt(2))
    with np.errstate(over="ignore"):  # far below zero GELU is zero
        return h / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))


def arrays_for(graph: pygraph, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    made = (rng.standard_normal(tensor.dim) * rng.uniform(0.5, 3) for tensor in graph.inputs)
    return tuple(jnp.asarray(x, t.data_type.value) for x, t in zip(made, graph.inputs, strict=True))


def check_bias_gelu(
    graph: pygraph, given: tuple[jax.Array, ...], got: tuple[jax.Array, ...], approximation: str
) -> None:
    named = {t.name: np.asarray(x, np.float64) for t, x in zip(graph.inputs, given, strict=True)}
    pre = named["x"] + named.get("bias", 0.0)
    want = [pre] if len(got) == 2 else []
    if want:  # rounded to its type before the gelu reads it
        pre = np.asarray(jnp.asarray(pre, got[0].dtype), np.float64)
    want.append(gelu(pre, approximation) + named.get("residual", 0.0))
    relative, absolute = ERROR[got[-1].dtype.name]
    for made, answer in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(made, np.float64), answer, rtol=relative, atol=absolute)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ERROR)
def test_every_type_and_option(dtype: str, options: dict[str, Any], rng: np.random.Generator) -> None:
    for rows, cols in SHAPES:
        graph = samples.bias_gelu(rows, cols, dtype, **options)
        given = arrays_for(graph, rng)
        before = [np.asarray(x) for x in given]
        got = jax.jit(lambda *x, graph=graph: cudnn_jax.call(graph, *x, implementation=ENGINE))(*given)
        check_bias_gelu(graph, given, got, options.get("approximation", "erf"))
        for x, y in zip(before, given, strict=True):
            np.testing.assert_array_equal(x, np.asarray(y))


@pytest.mark.parametrize("approximation", ["erf", "tanh"])
@pytest.mark.parametrize("dtype", ERROR)
def test_every_setting(dtype: str, approximation: str, rng: np.random.Generator) -> None:
    for rows, cols in SETTING_SHAPES:
        names = setting_names(samples.bias_gelu(rows, cols, dtype, approximation=approximation), target_of(None))
        assert len(names) >= 3
        for name in names:
            graph = samples.bias_gelu(rows, cols, dtype, approximation=approximation)
            given = arrays_for(graph, rng)
            got = cudnn_jax.call(graph, *given, implementation=name)
            again = cudnn_jax.call(graph, *given, implementation=name)
            check_bias_gelu(graph, given, got, approximation)
            np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(again[0]))


def test_the_kernel_leads() -> None:
    for _, graph in samples.samples():
        assert planning.plan(graph, target_of(None)).plan.engine == ENGINE


def test_the_tails_of_gelu(rng: np.random.Generator) -> None:
    """Every bfloat16 and float16 number, and many float32 ones, without bias and residual."""
    for dtype, words in (("bfloat16", np.uint16), ("float16", np.uint16), ("float32", np.uint32)):
        bits = np.arange(2**16, dtype=words) if words is np.uint16 else rng.integers(0, 2**32, 2**20, dtype=words)
        x = bits.view(jnp.dtype(dtype)).reshape(TAILS[dtype])
        x = np.where(np.isfinite(x.astype(np.float32)) & (np.abs(x.astype(np.float32)) < 1e4), x, 0).astype(x.dtype)
        for approximation in ("erf", "tanh"):
            graph = samples.bias_gelu(*x.shape, dtype, bias=False, residual=False, approximation=approximation)
            (got,) = cudnn_jax.call(graph, jnp.asarray(x), implementation=ENGINE)
            want = gelu(x.astype(np.float64), approximation)
            relative, _ = ERROR[dtype]
            # Below 2^-20 a float16 is subnormal and float32's exact GELU has lost its digits to 1 + erf.
            np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=relative, atol=2**-20)


def test_more_than_2_31_elements() -> None:
    rows, cols = WIDE
    graph = samples.bias_gelu(rows, cols)
    key = jax.random.key(7)
    given = [
        jax.random.normal(k, t.dim, jnp.bfloat16) for k, t in zip(jax.random.split(key, 3), graph.inputs, strict=True)
    ]
    (got,) = cudnn_jax.call(graph, *given, implementation=ENGINE)

    @jax.jit
    def farthest(at: Any, *arrays: Any) -> Any:
        x, residual, out = (jax.lax.dynamic_slice(a, (at, 0), (1024, cols)) for a in (arrays[0], arrays[2], arrays[3]))
        h = x.astype(jnp.float32) + arrays[1].astype(jnp.float32)
        want = jax.nn.gelu(h, approximate=False) + residual.astype(jnp.float32)
        return jnp.max(jnp.abs(out.astype(jnp.float32) - want) / (jnp.abs(want) + 0.25))

    starts = [*range(0, rows - 1024, 1024), rows - 1024]
    assert max(float(farthest(at, *given, got)) for at in starts) < 2**-7


CUDNN_DECLINES: dict[tuple[str, int | None], str] = {
    ("logical_and", None): "CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE",
    ("logical_not", None): "CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE",
    ("logical_or", None): "CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE",
    ("gen_index", 0): "gen_index along axis 0, asked from axis 1",
}
"""(mode, axis) -> why, of the cases that cuDNN 9.19 on an H200 does not serve in float32, or is not asked for."""


@pytest.mark.parametrize("mode, options", CASES, ids=lambda value: value if isinstance(value, str) else str(len(value)))
def test_cudnn_means_the_same_by_every_mode(mode: str, options: dict[str, Any], rng: np.random.Generator) -> None:
    arrays = draw(mode, rng)
    graph = graph_of_one(mode, arrays, options)
    assert manifest.family_for(graph).name == "pointwise"  # type: ignore[union-attr]
    try:
        (got,) = cudnn_jax.call(graph, *map(jnp.asarray, arrays), implementation="cudnn")
    except GraphNotSupportedError as error:
        known = CUDNN_DECLINES.get((mode, options.get("axis")))
        assert known and known in str(error), f"cuDNN serves this elsewhere: {error}"
        pytest.skip(str(error))
    want = np.asarray(expected(mode, arrays, options), np.float64)
    absolute = 2e-5 + CANCELS.get(mode, lambda y: 0.0)(want)
    error = np.abs(np.asarray(got, np.float64) - want)
    assert np.all(error <= absolute + 2e-5 * np.abs(want)), f"off by {error.max()}"


def test_cudnn_is_not_asked_for_what_it_gets_wrong() -> None:
    graph = pygraph(io_data_type="float32")
    graph.gen_index(graph.tensor((3, 5, 64)), axis=0).set_output(True)
    with pytest.raises(GraphNotSupportedError, match="gen_index along axis 0, asked from axis 1"):
        cudnn_jax.call(graph, jnp.zeros((3, 5, 64)), implementation="cudnn")


@pytest.mark.parametrize("spread", [0, 1, 2])
@pytest.mark.parametrize("dim", [(64, 96), (2, 64, 96), (2, 3, 64, 96)], ids=str)
def test_cudnn_fuses_a_bias_and_a_gelu(dim: tuple[int, ...], spread: int, rng: np.random.Generator) -> None:
    """`spread`: how many axes the bias is broadcast along, the last ones of all but the last, or with 2 all but it."""
    graph = pygraph(io_data_type="float32")
    own = {0: dim, 1: (*dim[:-2], 1, dim[-1]), 2: (*(1 for _ in dim[1:]), dim[-1])}[spread]
    x, bias = graph.tensor(dim, name="x"), graph.tensor(own, name="bias")
    graph.gelu(graph.bias(x, bias)).set_output(True)
    arrays = [rng.standard_normal(tensor.dim).astype(np.float32) for tensor in graph.inputs]
    try:
        (got,) = cudnn_jax.call(graph, *map(jnp.asarray, arrays), implementation="cudnn")
    except GraphNotSupportedError as error:
        if len(dim) == 2 or own[0] == 1:
            assert "rank 2" in str(error) or "broadcast along axis 0" in str(error)
            return
        pytest.skip(str(error))
    assert len(dim) > 2 and own[0] == dim[0]
    want = gelu(arrays[0].astype(np.float64) + arrays[1], "erf")
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-5, atol=2e-5)
