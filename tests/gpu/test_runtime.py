"""Programs of cuTile, CuTe-DSL and cuDNN steps under XLA: command buffers, threads, and a sanitizer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cudnn_jax import _ffi
from gpu import runtime_programs
from gpu.running import child, sanitizer

COMMAND_BUFFERS = {
    "off": "--xla_gpu_enable_command_buffer=",
    "on": "--xla_gpu_enable_command_buffer=CUSTOM_CALL,FUSION --xla_gpu_graph_min_graph_size=1",
}


def said(mode: str, *arguments: str, flags: str = "", prefix: tuple[str, ...] = ()) -> str:
    return child("gpu.runtime_programs", mode, *arguments, environment={"XLA_FLAGS": flags}, prefix=prefix)


def test_command_buffers_give_the_same_bits(tmp_path: Path) -> None:
    executions = {}
    for name, flags in COMMAND_BUFFERS.items():
        executions[name] = int(said("bits", str(tmp_path / f"{name}.npz"), flags=flags))
    # A recorded call reaches the handler when it is recorded, not each time it is replayed.
    assert executions["on"] < executions["off"]
    off, on = (np.load(tmp_path / f"{name}.npz") for name in ("off", "on"))
    for key in off.files:
        np.testing.assert_array_equal(off[key], on[key], err_msg=key)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_is_clean(tool: str) -> None:
    text = said("once", prefix=sanitizer(tool))
    assert "0 errors" in text or "0 hazards" in text, text[-2000:]


def test_threads_run_one_program_at_once(rng: np.random.Generator) -> None:
    calls = runtime_programs.calls()
    compiled = {name: (jax.jit(fn), fn, arrays) for name, (fn, arrays) in calls.items()}
    before = _ffi.counters()["executions"]

    def work(seed: int) -> None:
        own = np.random.default_rng(seed)
        for name, (fn, _, arrays) in compiled.items():
            drawn = [jnp.asarray(own.standard_normal(x.shape), x.dtype) for x in arrays]
            outs = [fn(*drawn) for _ in range(50)]
            alone = runtime_programs.reference(name, *drawn)
            for out in outs:
                for got, want in zip(out, alone, strict=True):
                    error = np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64)).max()
                    assert error < 0.05, (name, error)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, rng.integers(0, 2**31, 8)))
    assert _ffi.counters()["executions"] >= before + 8 * 50 * len(compiled)
