"""A fuzzer on the reader of programs, for a short time; `make fuzz` gives it ten minutes."""

from __future__ import annotations

import re
from pathlib import Path

import fuzzing
import pytest

pytestmark = pytest.mark.native

SECONDS = 20


def executions(figures: str) -> int:
    return int(re.search(r"\d+", figures)[0])  # type: ignore[index]


def test_our_own_fuzzer_finds_nothing(tmp_path: Path) -> None:
    figures = fuzzing.own(tmp_path)(SECONDS)
    assert executions(figures) > 1000, figures
    given, grown = map(int, re.findall(r"(\d+) inputs grew to (\d+)", figures)[0])
    assert grown > given, "coverage guided nothing"


def test_libfuzzer_finds_nothing(tmp_path: Path) -> None:
    run = fuzzing.libfuzzer(tmp_path)
    if run is None:
        pytest.skip("no clang with libFuzzer")
    assert executions(run(SECONDS)) > 1000
