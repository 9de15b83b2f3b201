"""Handles, devices and eager CUDA programs, without a GPU: recorded_calls.py in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import native
import pytest

SCRIPT = native.HERE / "recorded_calls.py"
NAMES = re.findall(r"^@test\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("a real driver would be found first")
    headers = ("cudnn.h", "cuda_runtime.h", "crt/host_config.h")
    return native.library(tmp_path_factory.mktemp("recorded"), "recording_cudnn.c", *headers)


@pytest.mark.parametrize("name", NAMES)
def test_(recording: Path, name: str) -> None:
    path = os.pathsep.join(str(folder) for folder in (native.HERE, native.HERE.parent))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-W", "error", SCRIPT, recording, name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0 and done.stdout == "passed\n", done.stdout + done.stderr
