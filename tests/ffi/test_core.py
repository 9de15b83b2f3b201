"""The C++ core alone, built with sanitizers: damaged artifacts, threads, and the rule for the CUDA context."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = [
    path for path in (*sorted(ROOT.glob("ffi/*.cc")), *sorted(ROOT.glob("ffi/steps/*.cc")))
    if not path.name.startswith(("module", "xla_handlers", "cudnn_", "eager_"))
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the header that CMake makes of the spec."""
    made = tmp_path_factory.mktemp("core")
    text = (ROOT / "ffi" / "program_spec.json").read_text()
    header = (ROOT / "ffi" / "program_spec.h.in").read_text()
    limits = json.loads(text)["limits"]
    for name, value in (("TEXT", text), ("OPERANDS", str(limits["operands"])), ("ARGS", str(limits["args"]))):
        header = header.replace(f"@PROGRAM_SPEC_{name}@", value)
    (made / "program_spec.h").write_text(header)
    (made / "core.cc").write_text("".join(f'#include "{path}"\n' for path in SOURCES))
    return made


@pytest.mark.parametrize(("sanitizer", "rounds"), [("address,undefined", 4000), ("thread", 0)])
def test_the_core_under_a_sanitizer(folder: Path, sanitizer: str, rounds: int) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    find = [sys.executable, ROOT / "ffi" / "cmake" / "find_headers.py", "cudnn_frontend.h", "nvidia-cudnn-frontend"]
    found = subprocess.run(find, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("the headers of the nvidia-cudnn-frontend wheel are not installed")
    driver, binary = folder / "librecording.so", folder / f"core_test_{sanitizer[:3]}"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", driver, HERE / "recording_driver.c"], check=True)
    includes = [f"-I{path}" for path in (ROOT, folder, ROOT / "ffi" / "third_party" / "xla", found.stdout.strip())]
    options = ["-std=c++17", "-O0", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", *includes]
    sources = [folder / "core.cc", HERE / "core_test.cc"]
    subprocess.run([compiler, *options, *sources, "-o", binary, "-ldl", "-pthread"], check=True)
    done = subprocess.run([binary, driver, str(rounds)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "core_test passed" in done.stdout
