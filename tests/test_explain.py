"""`cudnn_jax.explain`: what it finds in a function, and what it says of a library that is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import cudnn_jax
from support import stub_libcuda

QKV = [jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.bfloat16)] * 3


def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    once = cudnn_jax.sdpa(q, k, v, is_causal=True)
    return cudnn_jax.sdpa(once, k, v, is_causal=True).astype(jnp.float32).sum()


@pytest.mark.parametrize("jitted", [True, False])
def test_equal_operations_are_one_row_with_their_count(jitted: bool) -> None:
    fn = jax.grad(loss, argnums=(0, 1, 2))
    told = cudnn_jax.explain(jax.jit(fn) if jitted else fn, *QKV)
    assert [(row["operation"], row["count"]) for row in told.rows] == [("sdpa_fwd", 2), ("sdpa_bwd", 2)]
    assert told.engines() == {"sdpa_fwd": "xla", "sdpa_bwd": "xla"}
    assert told.rows[0]["facts"] == "fwd bfloat16 B2 T64 S64 heads 4/4 D32 causal top_left"
    assert told.rows[0]["declines"] == [["cudnn", "platform cpu, serves cuda"]]


def test_operations_are_found_inside_scan_and_cond() -> None:
    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        carried, _ = jax.lax.scan(lambda c, _: (cudnn_jax.sdpa(c, k, v), None), q, length=3)
        return jax.lax.cond(True, lambda x: cudnn_jax.sdpa(x, k, v, is_causal=True), lambda x: x, carried)

    assert len(cudnn_jax.explain(fn, *QKV).rows) == 2
    assert cudnn_jax.explain(lambda x: x + 1, QKV[0]).rows == ()


def test_json_and_text_hold_the_rows() -> None:
    told = cudnn_jax.explain(loss, *QKV)
    assert json.loads(told.to_json()) == {"target": "cpu", "missing": [], "rows": [dict(row) for row in told.rows]}
    text = str(told)
    assert text.startswith("operations on cpu")
    for word in ("operations on cpu", "sdpa_fwd x2", "causal top_left", "cudnn: platform cpu, serves cuda"):
        assert word in text


def test_a_reason_has_its_engine_in_front_once() -> None:
    rows = [jax.ShapeDtypeStruct((2, 8, 2, 16), jnp.bfloat16)] * 3 + [jax.ShapeDtypeStruct((2, 8, 2), jnp.bfloat16)] * 2
    told = cudnn_jax.explain(lambda *x: cudnn_jax.rms_norm(cudnn_jax.gdn(*x)[0]), *rows)
    engines = {engine for row in told.rows for engine, _ in row["declines"]}
    assert engines == {"cudnn", "cutile_gdn", "cutile_gdn_recurrent", "cutile_rmsnorm"}
    assert [reason for row in told.rows for engine, reason in row["declines"] if engine in reason] == []


WITHOUT_CUDNN = """
import jax, jax.numpy as jnp
from cudnn_jax.engines import libraries
libraries.candidates = dict  # no wheel brings a cuDNN
import cudnn_jax
q = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.bfloat16)
with cudnn_jax.aot.target("h200"):
    told = cudnn_jax.explain(cudnn_jax.sdpa, q, q, q)
print(told, end="====")
print(told.to_json())
"""


@pytest.mark.parametrize("missing", ["libcuda", "libcudnn"])
def test_without_a_library_the_reference_engine_serves_and_the_reason_is_said(missing: str, tmp_path: Path) -> None:
    folder = stub_libcuda.build(tmp_path) if missing == "libcudnn" else tmp_path
    environment = stub_libcuda.environment(folder) | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CUDNN], capture_output=True, text=True, check=True, env=environment
    )
    text, _, read = done.stdout.partition("====")
    told = json.loads(read)
    assert told["missing"] == [f"{name} could not be opened" for name in ("libcuda", "libcudnn") if name >= missing]
    said = f"cuDNN was not asked: {', '.join(told['missing'])}; `python -m cudnn_jax doctor` says more"
    assert [line.strip() for line in text.splitlines()[:2]] == [
        said,
        "operations on NVIDIA H200 (sm_90, ahead of time)",
    ]
    assert told["target"] == "NVIDIA H200 (sm_90, ahead of time)"
    ((engine, reason),) = told["rows"][0]["declines"]
    assert (told["rows"][0]["plan"], engine) == ("xla", "cudnn")
    assert reason.startswith(f"{missing} could not be opened")


def test_a_target_that_is_not_known_is_named_with_those_that_are() -> None:
    with (
        pytest.raises(ValueError, match="target='h300' is not known; known targets: h200"),
        cudnn_jax.aot.target("h300"),
    ):
        pass
    assert "h200" in cudnn_jax.aot.known_targets()


def test_lowering_for_cuda_without_a_gpu_asks_for_a_target() -> None:
    exported = jax.export.export(jax.jit(cudnn_jax.sdpa), platforms=["cuda"])
    with pytest.raises(RuntimeError, match="name the GPU, as in `with cudnn_jax.aot.target"):
        exported(*QKV)


def test_keywords_that_are_no_arrays_stay_as_they_are() -> None:
    told = cudnn_jax.explain(cudnn_jax.sdpa, *QKV, is_causal=True, implementation="xla", bias=None)
    assert told.rows[0]["facts"].endswith("causal top_left")
