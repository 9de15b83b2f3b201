"""The whole call path with no GPU: `cudnn_jax.sdpa` through a stand-in engine's program and the CPU handler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import cudnn_jax
from cudnn_jax import _ffi
from cudnn_jax.engines import manifest
from support import standin

SLOT = manifest.EngineSlot(1, "mix", ("support.standin", "Mix"))
SHAPE = (2, 5, 3, 8)


@pytest.fixture(autouse=True)
def _standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    standin.register_symbol(tmp_path)
    with standin.family(monkeypatch, "sdpa_fwd", SLOT):
        yield
    jax.clear_caches()


def qkv(rng: np.random.Generator) -> list[jax.Array]:
    return [jnp.asarray(rng.standard_normal(SHAPE), jnp.float32) for _ in "qkv"]


def mixed(q: jax.Array, k: jax.Array, v: jax.Array) -> np.ndarray:
    return np.asarray(q) + 10 * np.asarray(k) + 100 * np.asarray(v)


def test_explain_names_the_engine_that_runs(rng: np.random.Generator) -> None:
    (row,) = cudnn_jax.explain(cudnn_jax.sdpa, *qkv(rng)).rows
    assert (row["plan"], row["artifact"], row["workspace"]) == ("mix", "program", 512)
    assert row["plans"] == ["mix", "xla"]


@pytest.mark.parametrize("jitted", [True, False])
def test_the_program_runs_with_its_operands_in_order(jitted: bool, rng: np.random.Generator) -> None:
    before = _ffi.counters()["executions"]
    fn = jax.jit(cudnn_jax.sdpa) if jitted else cudnn_jax.sdpa
    for _ in range(3):
        operands = qkv(rng)
        np.testing.assert_allclose(fn(*operands), mixed(*operands), rtol=1e-6)
    assert _ffi.counters()["executions"] == before + 3


def test_a_call_inside_vmap_scan_and_grad(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng)
    stacked = jnp.stack([q, 2 * q])
    np.testing.assert_allclose(
        jax.vmap(cudnn_jax.sdpa, (0, None, None))(stacked, k, v)[1], mixed(2 * q, k, v), rtol=1e-6
    )
    carried, _ = jax.lax.scan(lambda c, _: (cudnn_jax.sdpa(c, k, v) / 100, None), q, length=2)
    np.testing.assert_allclose(carried, mixed(mixed(q, k, v) / 100, k, v) / 100, rtol=1e-5)
    out, _ = jax.vjp(cudnn_jax.sdpa, q, k, v)
    np.testing.assert_allclose(out, mixed(q, k, v), rtol=1e-6)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices; tests/conftest.py asks XLA for them on a CPU")
def test_each_device_of_a_mesh_runs_a_program_for_its_share(rng: np.random.Generator) -> None:
    mesh = jax.make_mesh((2, 3), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6])
    operands = qkv(rng)
    placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", None, "model"))) for x in operands]
    compiled = jax.jit(cudnn_jax.sdpa).lower(*placed).compile()
    text = compiled.as_text()
    assert not re.findall("all-gather|all-to-all|collective-permute", text)
    calls = re.findall(r"(f32\[[\d,]*\]).* custom-call\(.*cudnn_jax\.program", text)
    assert calls == ["f32[1,1,5,8]"]  # Axes of length 1 have no order in memory.
    np.testing.assert_allclose(compiled(*placed), mixed(*operands), rtol=1e-6)


def test_another_implementation_is_not_served_by_it(rng: np.random.Generator) -> None:
    operands = qkv(rng)
    out = jax.jit(lambda *qkv: cudnn_jax.sdpa(*qkv, implementation="xla"))(*operands)
    want = jax.nn.dot_product_attention(*operands)
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)


CHILD = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
import pathlib
from support import standin
standin.register_symbol(pathlib.Path(sys.argv[2]))
import jax
from jax import export
loaded = export.deserialize(bytearray(open(sys.argv[3], "rb").read()))
q, k, v = np.load(sys.argv[4])
np.save(sys.argv[5], jax.jit(loaded.call)(q, k, v))
"""


def test_an_exported_call_runs_in_a_new_process(tmp_path: Path, rng: np.random.Generator) -> None:
    operands = qkv(rng)
    checks = [export.DisabledSafetyCheck.custom_call("cudnn_jax.program")]
    made = export.export(jax.jit(cudnn_jax.sdpa), disabled_checks=checks)(*operands)
    files = [tmp_path / name for name in ("exported", "in.npy", "out.npy")]
    files[0].write_bytes(made.serialize())
    np.save(files[1], np.stack(operands))
    tests = Path(__file__).parent.parent
    subprocess.run(
        [sys.executable, "-c", CHILD, str(tests), str(tmp_path), *map(str, files)], check=True, env=os.environ
    )
    np.testing.assert_allclose(np.load(files[2]), mixed(*operands), rtol=1e-6)
