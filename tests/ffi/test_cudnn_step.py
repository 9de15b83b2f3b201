"""The "cudnn" step, built with sanitizers, against a driver and a cuDNN that record their calls."""

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
    *(ROOT / "ffi" / f"cudnn_{part}.cc" for part in ("graph_text", "handles", "library", "plan", "plan_text", "step", "user_handle")),
    *(ROOT / "ffi" / f"{name}.cc" for name in ("driver", "json", "library", "spec", "step")),
]
HEADERS = [
    ("cudnn_frontend.h", "nvidia-cudnn-frontend"),
    ("cudnn.h", "nvidia-cudnn-jit-cu13", "nvidia-cudnn-cu13"),
    ("cuda_runtime.h", "nvidia-cuda-runtime"),
    ("crt/host_config.h", "nvidia-cuda-crt"),
]


def wheel_folder(header: str, *wheels: str) -> str:
    command = [sys.executable, ROOT / "ffi" / "cmake" / "find_headers.py", header, *wheels]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"{header} is in none of the installed wheels")
    return found.stdout.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the header that CMake makes of the spec."""
    made = tmp_path_factory.mktemp("step")
    text = (ROOT / "ffi" / "program_spec.json").read_text()
    header = (ROOT / "ffi" / "program_spec.h.in").read_text()
    limits = json.loads(text)["limits"]
    for name, value in (("TEXT", text), ("OPERANDS", str(limits["operands"])), ("ARGS", str(limits["args"]))):
        header = header.replace(f"@PROGRAM_SPEC_{name}@", value)
    (made / "program_spec.h").write_text(header)
    (made / "sources.cc").write_text("".join(f'#include "{path}"\n' for path in SOURCES))
    return made


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_step_under_a_sanitizer(folder: Path, sanitizer: str) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    includes = [f"-isystem{wheel_folder(*header)}" for header in HEADERS]
    library, binary = folder / "librecording.so", folder / f"cudnn_step_test_{sanitizer[:3]}"
    subprocess.run(["cc", "-shared", "-fPIC", *includes, "-o", library, HERE / "recording_cudnn.c"], check=True)
    options = ["-std=c++17", "-O0", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    sources = [folder / "sources.cc", HERE / "cudnn_step_test.cc"]
    options += [f"-I{ROOT}", f"-I{folder}", *includes]
    subprocess.run([compiler, *options, *sources, "-o", binary, "-ldl", "-pthread"], check=True)
    done = subprocess.run([binary, library], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cudnn_step_test passed" in done.stdout
