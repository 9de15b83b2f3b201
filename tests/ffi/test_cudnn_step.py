"""The "cudnn" step, built with sanitizers, against a driver and a cuDNN that record their calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import native
import pytest

HEADERS = ("cudnn.h", "cuda_runtime.h", "crt/host_config.h")
PARTS = ("graph_text", "handles", "library", "plan", "plan_text", "step", "user_handle")


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread", ""])
def test_the_step_under_a_sanitizer(sanitized: Callable[[str], native.Build], tmp_path: Path, sanitizer: str) -> None:
    build = sanitized(sanitizer)
    sources = [native.ROOT / "ffi" / f"cudnn_{part}.cc" for part in PARTS]
    step = build.compile("cudnn", sources, headers=HEADERS)
    library = native.library(tmp_path, "recording_cudnn.c", *HEADERS)
    native.run(build.program("cudnn_step_test.cc", build.core, step, headers=HEADERS), library)
