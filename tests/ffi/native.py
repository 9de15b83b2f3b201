"""Builds of the C++ core alone, under sanitizers, for the tests that are C++ programs."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

SPEC = json.loads((ROOT / "ffi" / "program_spec.json").read_text())
CORE = [
    path for path in (*sorted(ROOT.glob("ffi/*.cc")), *sorted(ROOT.glob("ffi/steps/*.cc")))
    if not path.name.startswith(("module", "xla_handlers", "cudnn_", "eager_"))
]  # fmt: skip
"""What needs neither Python, XLA nor cuDNN's headers."""

CUDNN = [
    ROOT / "ffi" / f"cudnn_{part}.cc"
    for part in ("graph_text", "handles", "library", "plan", "plan_text", "step", "user_handle")
]
"""The "cudnn" step without what plans."""
CUDNN_HEADERS = ("cudnn.h", "cuda_runtime.h", "crt/host_config.h")

WHEELS = {
    "cudnn_frontend.h": ("nvidia-cudnn-frontend",),
    "cudnn.h": ("nvidia-cudnn-jit-cu13", "nvidia-cudnn-cu13"),
    "cuda_runtime.h": ("nvidia-cuda-runtime",),
    "crt/host_config.h": ("nvidia-cuda-crt",),
}


@functools.cache
def wheel_folder(header: str) -> str:
    """Where an installed wheel has the header; skips the test if none has."""
    command = [sys.executable, ROOT / "ffi" / "cmake" / "find_headers.py", header, *WHEELS[header]]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"{header} is in none of the installed wheels")
    return found.stdout.strip()


def library(folder: Path, source: str, *headers: str) -> Path:
    """A shared library of one of the C files beside this one."""
    made = folder / f"lib{Path(source).stem}.so"
    includes = [f"-isystem{wheel_folder(header)}" for header in headers]
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Wextra", *includes, "-o", made, HERE / source]
    subprocess.run(command, check=True)
    return made


def checked(sanitizer: str) -> list[str]:
    """Options for one sanitizer or several; for none, those that count calls."""
    if not sanitizer:
        return ["-O1", "-DCOUNT_CALLS"]
    return ["-O0", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]


class Build:
    """Builds with the same options in one folder: the core is compiled once and linked into each program."""

    def __init__(self, folder: Path, options: Sequence[str], compiler: str = "g++") -> None:
        self.folder = folder
        self.compiler = compiler
        self.options = ["-std=c++17", "-g1", *options]
        self._write_header()

    @functools.cached_property
    def core(self) -> Path:
        return self.compile("core", CORE)

    @functools.cached_property
    def cudnn(self) -> Path:
        return self.compile("cudnn", CUDNN, headers=CUDNN_HEADERS)

    def compile(self, name: str, sources: Iterable[Path], *more: str, headers: Sequence[str] = ()) -> Path:
        """One object of several sources."""
        unit = self.folder / f"{name}.cc"
        unit.write_text("".join(f'#include "{path}"\n' for path in sources))
        made = self.folder / f"{name}.o"
        self._run("-c", unit, "-o", made, *more, headers=headers)
        return made

    def program(self, source: str, *objects: object, headers: Sequence[str] = ()) -> Path:
        """A binary of a C++ file beside this one, and of objects."""
        made = self.folder / Path(source).stem
        self._run(HERE / source, *objects, "-o", made, "-ldl", "-pthread", headers=headers)
        return made

    def _run(self, *arguments: object, headers: Sequence[str] = ()) -> None:
        compiler = shutil.which(self.compiler)
        if compiler is None:
            pytest.skip(f"no {self.compiler}")
        includes = [f"-I{path}" for path in (ROOT, HERE, self.folder)]
        systems = [ROOT / "ffi" / "third_party" / "xla", *map(wheel_folder, ("cudnn_frontend.h", *headers))]
        command = [compiler, *self.options, *includes, *(f"-isystem{path}" for path in systems), *arguments]
        subprocess.run([str(part) for part in command], check=True)

    def _write_header(self) -> None:
        """What CMake makes of the layout's specification."""
        header = (ROOT / "ffi" / "program_spec.h.in").read_text()
        for name, value in SPEC["limits"].items():
            header = header.replace(f"@PROGRAM_SPEC_{name.upper()}@", str(value))
        header = header.replace("@PROGRAM_SPEC_TEXT@", (ROOT / "ffi" / "program_spec.json").read_text())
        (self.folder / "program_spec.h").write_text(header)


def run(binary: Path, *arguments: object, timeout: float = 300) -> str:
    """The output of a test program, which says last that it passed."""
    command = [str(part) for part in (binary, *arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{binary.name} passed" in done.stdout, done.stdout
    return done.stdout
