"""Planning with a real cuDNN and no GPU: a stub libcuda.so.1, and a process that plans over it.

The process is apart because a stub driver, once open, would be the driver of everything that follows in this one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
H200 = (HERE.parents[1] / "data" / "h200.json").read_text()
CUDNN = 91900

_NEEDED = {"nvidia-cudnn-jit-cu13": "9.19.", "nvidia-cuda-nvrtc": "13."}
"""The wheels that planning takes; the answers in these tests are those of this cuDNN."""


class Refused(Exception):
    """What the process answered instead of a result: the exception's name and its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


@dataclass
class Planner:
    """A process with the stub for a driver. One call at a time."""

    process: subprocess.Popen[str]

    def ask(self, call: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the planning process ended with {self.process.wait()} at {call}"
        answer = json.loads(line)
        if "refused" in answer:
            raise Refused(*answer["refused"])
        return answer["result"]


def wheels() -> None:
    """Skips when the wheels or a C compiler are not there."""
    for name, wanted in _NEEDED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            pytest.skip(f"{name} is not installed")
        if not found.startswith(wanted):
            pytest.skip(f"{name} is {found}, these tests know {wanted}*")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")


def build(folder: Path) -> Path:
    """Compiles the stub; returns the folder for LD_LIBRARY_PATH."""
    library = folder / "libcuda.so.1"
    command = ["cc", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{library.name}"]
    subprocess.run([*command, "-o", library, HERE / "libcuda.c", "-ldl"], check=True)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process whose driver is the stub in `folder`, and that finds no other cuDNN."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDNN", "LD_"))}
    return {**kept, "LD_LIBRARY_PATH": str(folder), "CUDNN_JAX_CACHE_DIR": ""}


def told_by(code: str, folder: Path, *words: str, timeout: float = 120, **variables: str) -> dict[str, Any]:
    """What a process that runs `code` over the stub in `folder` prints as JSON; the tests' modules are at hand there."""
    paths = [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths), **variables}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(folder) | more, timeout=timeout)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def candidates() -> dict[str, list[str]]:
    """Those two wheels' libraries, also where a full cuDNN is installed beside them."""
    packages = {"cudnn": ("nvidia.cudnn_jit", "libcudnn.so.9"), "nvrtc": ("nvidia.cu13", "libnvrtc.so.13")}
    return {library: [str(_library_folder(package) / file)] for library, (package, file) in packages.items()}


def _library_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)), "lib")


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wheels()
    return build(tmp_path_factory.mktemp("stub_libcuda"))


@contextmanager
def planning(folder: Path, **variables: str) -> Iterator[Planner]:
    command = [sys.executable, HERE / "planning_process.py", json.dumps(candidates())]
    process = subprocess.Popen(
        command, env=environment(folder) | variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        yield Planner(process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="session")
def planner(stub_folder: Path) -> Iterator[Planner]:
    with planning(stub_folder) as process:
        yield process
