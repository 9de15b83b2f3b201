"""The C++ core alone, built with sanitizers: damaged artifacts, threads, kernels, and the rule for the CUDA context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import native
import pytest

pytestmark = pytest.mark.native


@pytest.mark.parametrize(("sanitizer", "rounds"), [("address,undefined", 4000), ("thread", 0)])
def test_the_core_under_a_sanitizer(
    sanitized: Callable[[str], native.Build], tmp_path: Path, sanitizer: str, rounds: int
) -> None:
    build = sanitized(sanitizer)
    native.run(build.program("core_test.cc", build.core), native.library(tmp_path, "recording_driver.c"), rounds)


def test_the_view_of_cuda_is_that_of_its_header(sanitized: Callable[[str], native.Build]) -> None:
    build = sanitized("address,undefined")
    build.compile("cuda_abi", [native.HERE / "cuda_abi_test.cc"], headers=["cuda_runtime.h", "crt/host_config.h"])
