"""The checked-in type stub is what the extension says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nanobind", reason="nanobind generates the stub")
FOLDER = Path(__file__).parents[2] / "ffi"


def test_the_stub_is_up_to_date(tmp_path: Path) -> None:
    fresh = tmp_path / "fresh.pyi"
    subprocess.run([sys.executable, FOLDER / "cmake" / "make_stub.py", fresh], check=True)
    assert (FOLDER / "_ffi.pyi").read_text() == fresh.read_text(), "run python ffi/cmake/make_stub.py"
