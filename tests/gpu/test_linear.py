"""The kernels of linear attention under compute-sanitizer."""

from __future__ import annotations

import pytest

from gpu.running import child, sanitizer, skip_without_programs
from gpu.sanitized import environment


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_is_clean(tool: str) -> None:
    skip_without_programs()
    settings = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=", **environment()}
    text = child("gpu.linear_once", environment=settings, prefix=sanitizer(tool))
    assert "0 errors" in text or "0 hazards" in text, text[-2000:]
