"""The "cubin" and "cute" steps, built with sanitizers, against a driver and a CuTe-DSL runtime that record their calls,
and the "cute" step against the real runtime, with functions that run on the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import native
import pytest

from cudnn_jax.engines import libraries

pytestmark = pytest.mark.native


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_steps_under_a_sanitizer(
    sanitized: Callable[[str], native.Build], tmp_path: Path, cute_object: Path, sanitizer: str
) -> None:
    build = sanitized(sanitizer)
    library = native.library(tmp_path, "recording_cute.c")
    native.run(build.program("kernel_steps_test.cc", build.core), library, cute_object)


def test_the_real_runtime_takes_what_the_step_hands_over(
    sanitized: Callable[[str], native.Build], tmp_path: Path, cute_object: Path
) -> None:
    found = libraries.candidates()["cute_dsl_runtime"]
    if not found:
        pytest.skip("the wheel with libcute_dsl_runtime is not installed")
    build = sanitized("address,undefined")
    library = native.library(tmp_path, "recording_cute.c")
    native.run(build.program("kernel_steps_test.cc", build.core), library, found[0], cute_object)
