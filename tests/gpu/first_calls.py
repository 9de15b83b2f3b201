"""`python -m gpu.first_calls MODE FILE`: the first calls of one function on several devices of a fresh process.

Modes: "calls" come at the same time, compilation and all; "executions" do, of what was compiled before; "backwards" are
calls in turn, the last device first. On GPUs each call is made by a thread to which the context of another device is
bound. Each device must then hold what FILE does, and what it held before.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import pytest

from cudnn_jax import _ffi
from gpu.poison import poisoned_outputs
from gpu.running import child
from gpu.sanitized import as_asked
from support.attention.harness import QUICK
from support.over_devices import COUNT, OPERATIONS, both, close, drawn, expected, same_bits

MODES = ("calls", "executions", "backwards")
SIZES = {"cpu": (1, 2, 2, 4), "gpu": (2, 96, 2, 64)}
NAMES = {"cpu": ("sdpa",), "gpu": tuple(OPERATIONS)}
DTYPES = {"cpu": "float32", "gpu": "bfloat16"}
CANARIES = [1 << n for n in (8, 12, 16, 20, 24)]
"""Bytes of arrays that lie between the others, and that nobody may write."""
PATIENCE_S = 100.0


def problem() -> dict[str, tuple[Any, ...]]:
    """Operation -> what `drawn` and `expected` take."""
    platform = jax.default_backend()
    return {name: (name, SIZES[platform], DTYPES[platform]) for name in NAMES[platform]}


def step(given: dict[str, Any]) -> dict[str, Any]:
    return {name: both(name)(*arrays) for name, arrays in given.items()}


def bind_context(ordinal: int) -> None:
    """Makes the primary context of a GPU the calling thread's, behind the back of all libraries."""
    cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
    for status in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(device), ordinal),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        cuda.cuCtxSetCurrent(context),
    ):
        assert status == 0, f"the driver returned {status}"


def run(mode: str, file: Path) -> None:
    devices, on_gpu = jax.local_devices()[:COUNT], jax.default_backend() == "gpu"
    host = {name: drawn(*about) for name, about in problem().items()}
    patterns = [np.arange(size, dtype=np.uint32).astype(np.uint8) for size in CANARIES]
    held = []
    for device in devices:
        before = jax.device_put(patterns, device)
        given = jax.device_put(host, device)
        held.append((given, [*before, *jax.device_put(patterns, device)]))
    jax.block_until_ready(held)

    call = jax.jit(step, compiler_options=None if on_gpu else QUICK)
    calls = [call.lower(given).compile() if mode == "executions" else call for given, _ in held]
    barrier = Barrier(1 if mode == "backwards" else len(devices))

    def first(at: int) -> Any:
        if on_gpu:
            bind_context(devices[(at + 1) % len(devices)].local_hardware_id)
        barrier.wait(PATIENCE_S)
        return jax.block_until_ready(calls[at](held[at][0]))

    order = range(len(devices))
    with ThreadPoolExecutor(1 if mode == "backwards" else len(devices)) as pool:
        done = list(pool.map(first, reversed(order) if mode == "backwards" else order))

    wanted = np.load(file)
    for name, (_, _, dtype) in problem().items():
        results = [made[name] for made in done]
        close(results[0], [wanted[f"{name}{at}"] for at in range(len(results[0]))], dtype)
        for each in results[1:]:
            same_bits(each, results[0])
    for _, canaries in held:
        same_bits(canaries, patterns * 2)
    print(_ffi.counters()["handles"], "handles of cuDNN in", mode)


def processes(
    count: int,
    at_once: int,
    timeout: float,
    prefix: tuple[str, ...] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Runs as many fresh processes, whose modes take turns; returns what they said. One that hangs is a failure."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "expected.npz"
        wanted = {name: expected(*about) for name, about in problem().items()}
        np.savez(file, **{f"{name}{at}": x for name, results in wanted.items() for at, x in enumerate(results)})

        def one(mode: str) -> str:
            settings = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", ""), **environment}
            return child("gpu.first_calls", mode, str(file), prefix=prefix, timeout=timeout, environment=settings)

        modes: Iterator[str] = itertools.islice(itertools.cycle(MODES), count)
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(one, modes))


if __name__ == "__main__":
    as_asked()
    with poisoned_outputs(pytest.MonkeyPatch()):
        run(sys.argv[1], Path(sys.argv[2]))
