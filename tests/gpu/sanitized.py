"""Programs for a process that compute-sanitizer watches: without TMA.

What TMA moves it does not see, and descriptors that a kernel writes lie in memory of the driver's, which it takes for an
error.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cudnn_jax.engines import cutile

_ASKED = "CUDNN_JAX_TEST_WITHOUT_TMA"


def environment() -> dict[str, str]:
    """Of such a process. Programs that were built elsewhere lie beside the others."""
    folder = os.environ.get("CUDNN_JAX_PROGRAMS")
    return {_ASKED: "1"} | ({"CUDNN_JAX_PROGRAMS": str(Path(folder).with_name("sanitizer"))} if folder else {})


def as_asked() -> None:
    """What such a process begins with."""
    if os.environ.get(_ASKED) != "1":
        return
    try:
        cutile.available()
    except ImportError:
        return
    without_tma(pytest.MonkeyPatch())


def without_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are compiled from now on load and store with plain instructions."""
    from cuda.tile import _ir2bytecode

    usual = _ir2bytecode.BytecodeContext.load_store_hints
    plain = lambda self, latency, allow_tma: usual(self, latency, False)  # noqa: E731
    monkeypatch.setattr(_ir2bytecode.BytecodeContext, "load_store_hints", plain)
    cutile._compile.cache_clear()
