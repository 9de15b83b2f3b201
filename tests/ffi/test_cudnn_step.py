"""The "cudnn" step, built with sanitizers, against a driver and a cuDNN that record their calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import native
import pytest

pytestmark = pytest.mark.native


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread", ""])
def test_the_step_under_a_sanitizer(sanitized: Callable[[str], native.Build], tmp_path: Path, sanitizer: str) -> None:
    build = sanitized(sanitizer)
    library = native.library(tmp_path, "recording_cudnn.c", *native.CUDNN_HEADERS)
    native.run(build.program("cudnn_step_test.cc", build.core, build.cudnn, headers=native.CUDNN_HEADERS), library)
