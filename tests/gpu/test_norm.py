"""The cuTile RMS norm on a GPU: every setting of every case against the float64 answer.

Outputs and workspace are NaN before each program runs: here, or in the folder that `gpu.ahead` filled. Without either
the compiler or the folder a case is skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax.engines import cutile
from gpu.norm_programs import CASES, ENGINE, WIDE, implementations
from gpu.poison import poisoned_outputs
from gpu.running import run
from support.norms import Case


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with poisoned_outputs(monkeypatch):
        yield


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_setting_is_right_and_repeats_its_bits(case: Case, direction: str, rng: np.random.Generator) -> None:
    drawn = case.draw(rng)
    arrays = getattr(case, f"{direction}_inputs")(drawn)
    names = implementations(getattr(case, direction)())
    assert names
    for name in names:
        graph = getattr(case, direction)()
        first, second = ([np.asarray(array) for array in run(graph, arrays, name)] for _ in range(2))
        case.check(getattr(case, f"{direction}_names"), first, drawn)
        for again, once in zip(second, first, strict=True):
            np.testing.assert_array_equal(again.view(np.uint8), once.view(np.uint8), name)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_more_than_2_to_31_elements(direction: str) -> None:
    graph = getattr(WIDE, direction)()
    (name, *_) = implementations(graph)
    keys = jax.random.split(jax.random.key(np.random.SeedSequence().generate_state(1)[0]), 2)
    x, grad = (jax.random.normal(key, WIDE.dim, jnp.bfloat16) for key in keys)
    scale = jnp.linspace(0.5, 1.5, WIDE.dim[1], dtype=jnp.bfloat16)[None]
    tail = slice(WIDE.dim[0] - 64, None)

    def plain(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = rows.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide**2, 1, keepdims=True) + WIDE.epsilon)
        return wide * inverse, inverse

    normal, inverse = plain(x[tail])
    if direction == "forward":
        y, statistics = run(graph, (x, scale), name)
        close(y[tail], normal * scale)
        close(statistics[tail], inverse)
    else:
        statistics = jax.lax.map(lambda row: plain(row[None])[1][0], x, batch_size=4096)
        dx, d_scale = run(graph, (grad, x, scale, statistics), name)
        inner = grad[tail] * scale
        close(dx[tail], inverse * (inner - normal * jnp.mean(inner * normal, 1, keepdims=True)))
        sums = jax.lax.map(lambda pair: pair[0] * plain(pair[1][None])[0][0], (grad, x), batch_size=4096)
        close(d_scale[0], jnp.sum(sums, 0, dtype=jnp.float32))


def close(got: jax.Array, want: jax.Array) -> None:
    got, want = (np.asarray(array).astype(np.float64) for array in (got, want))
    assert np.linalg.norm(got - want) <= 1.5e-2 * np.linalg.norm(want)


def test_the_engine_runs_by_default() -> None:
    case = CASES[0]
    told = cudnn_jax.explain(
        lambda *arrays: cudnn_jax.call(case.forward(), *arrays),
        *(jax.ShapeDtypeStruct(tensor.dim, tensor.data_type.value) for tensor in case.forward().inputs),
    )
    try:
        cutile.available()
    except ImportError as missing:
        pytest.skip(str(missing))
    assert told.engines() == {"call": ENGINE}
