"""The kernels of linear attention under compute-sanitizer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu.running import child, sanitizer, skip_without_programs


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_is_clean(tool: str) -> None:
    skip_without_programs()
    environment = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    if folder := os.environ.get("CUDNN_JAX_PROGRAMS"):
        environment["CUDNN_JAX_PROGRAMS"] = str(Path(folder).with_name("sanitizer"))
    text = child("gpu.linear_once", environment=environment, prefix=sanitizer(tool))
    assert "0 errors" in text or "0 hazards" in text, text[-2000:]
