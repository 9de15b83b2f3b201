"""`cudnn_jax.sdpa` through cuDNN on a GPU, on every attention case, against the float64 oracle.

float32 cases run as bfloat16 and as float16, since cuDNN has no float32 attention, and cases with a cotangent of the
residual run without it too, since cuDNN has no port for it. Padding holds large numbers rather than NaN, which cuDNN's
backward multiplies by zero. Outputs and workspace are NaN before each program runs. What cuDNN declines must be listed
in declines.json with its reason; the reference engine answers it on the GPU and is checked the same way.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax import _ffi
from gpu.poison import poisoned_outputs
from support import public
from support.attention.harness import CASES, Case, arrays, check, expected

DECLINES = json.loads((Path(__file__).parent / "declines.json").read_text())
SEEN: dict[str, dict[str, str]] = {}


def _variants(case: Case) -> list[Case]:
    dtypes = ("bfloat16", "float16") if case.dtype == "float32" else (case.dtype,)
    return [
        dataclasses.replace(case, dtype=dtype, d_lse=d_lse, garbage=1e3, name=f"{case.name}-{dtype}{'-d_lse' * d_lse}")
        for dtype in dtypes
        for d_lse in sorted({False, case.d_lse})
    ]


GPU_CASES = [each for case in CASES for each in _variants(case)]


def _declines(case: Case, given: dict[str, np.ndarray]) -> dict[str, str]:
    """operation -> cuDNN's reason, for the operations of the case that cuDNN does not run."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    told = cudnn_jax.explain(public.traced(case), shapes)
    assert {row["operation"] for row in told.rows} == {"sdpa_fwd", "sdpa_bwd"}
    reasons = {}
    for row in told.rows:
        if row["engine"] != "cudnn":
            assert row["engine"] == "xla"
            reasons[row["operation"]] = "; ".join(
                reason for engine, reason in row["declines"] if engine.startswith("cudnn")
            )
    return reasons


@pytest.fixture(scope="module", autouse=True)
def _report() -> Iterator[None]:
    """With CUDNN_JAX_DECLINES=FOLDER, writes what was declined there: the next declines.json."""
    yield
    if "CUDNN_JAX_DECLINES" in os.environ:
        seen = {"cudnn": _ffi.cudnn_version(), "cases": dict(sorted(SEEN.items()))}
        Path(os.environ["CUDNN_JAX_DECLINES"], f"{os.getpid()}.json").write_text(json.dumps(seen, indent=1))


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with poisoned_outputs(monkeypatch):
        yield


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_values_and_gradients(case: Case) -> None:
    given = arrays(case)
    reasons = _declines(case, given)
    if reasons:
        SEEN[case.name] = reasons
    check(case, public.run(case, given), expected(case, given))
    listed = DECLINES["cases"].get(case.name, {})
    if _ffi.cudnn_version() == DECLINES["cudnn"]:
        assert reasons == listed, f"cuDNN declines {reasons}, declines.json lists {listed}"


def test_a_second_run_gives_the_same_bits_when_asked_to() -> None:
    rng = np.random.default_rng()
    q, k, v, d_out = (jnp.asarray(rng.standard_normal((2, 512, 4, 64)), jnp.bfloat16) for _ in range(4))

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(lambda *x: cudnn_jax.sdpa(*x, is_causal=True, deterministic=True), q, k, v)
        return (out, *pullback(d_out))

    jitted = jax.jit(gradients)
    first = [np.asarray(x) for x in jitted(q, k, v)]
    for _ in range(5):
        for got, want in zip(jitted(q, k, v), first, strict=True):
            np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("shape", [(2, 4, 97, 97), (2, 4, 97, 1)], ids=str)
def test_rows_that_a_bias_empties_take_no_gradient(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng()
    q, k, v, d_out = (jnp.asarray(rng.standard_normal((2, 97, 4, 64)), jnp.bfloat16) for _ in range(4))
    bias = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16).at[0].set(-jnp.inf)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, implementation: str) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(lambda *x: cudnn_jax.sdpa(*x, bias, implementation=implementation), q, k, v)
        return (out, *pullback(d_out))

    got, want = (jax.jit(both, static_argnums=3)(q, k, v, name) for name in ("cudnn", "xla"))
    for ours, reference in zip(got, want, strict=True):
        assert not np.float32(ours[0]).any()
        error = np.linalg.norm(np.float32(ours) - np.float32(reference)) / np.linalg.norm(np.float32(reference))
        assert error < 1e-2


def test_cudnn_runs_what_explain_says_it_runs() -> None:
    q = jnp.ones((2, 128, 4, 64), jnp.bfloat16)
    assert cudnn_jax.explain(cudnn_jax.sdpa, q, q, q).engines() == {"sdpa_fwd": "cudnn"}
    before = _ffi.counters()["executions"]
    jax.block_until_ready(jax.jit(cudnn_jax.sdpa)(q, q, q))
    assert _ffi.counters()["executions"] == before + 1


def test_every_plan_of_the_list_gives_the_same_answer() -> None:
    rng = np.random.default_rng()
    q, k, v, d_out = (jnp.asarray(rng.standard_normal((2, 512, 4, 128)), jnp.bfloat16) for _ in range(4))

    def both(q: jax.Array, k: jax.Array, v: jax.Array, plan: str | None = None) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(lambda *x: cudnn_jax.sdpa(*x, is_causal=True, implementation=plan), q, k, v)
        return (out, *pullback(d_out))

    want = jax.jit(lambda *x: both(*x, plan="xla"))(q, k, v)
    (row,) = cudnn_jax.explain(lambda *x: cudnn_jax.sdpa(*x, is_causal=True), q, k, v).rows
    plans = [plan for plan in row["plans"] if plan.startswith("cudnn")]
    assert len(plans) > 1
    for plan in plans:
        try:
            got = jax.jit(lambda *x, plan=plan: cudnn_jax.sdpa(*x, is_causal=True, implementation=plan))(q, k, v)
        except cudnn_jax.GraphNotSupportedError:
            continue
        error = np.linalg.norm(np.float32(got) - np.float32(want[0])) / np.linalg.norm(np.float32(want[0]))
        assert error < 5e-3, plan
