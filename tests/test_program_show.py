"""`python -m cudnn_jax program show` tells what is in a program, and says in one line what is wrong with a file."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cudnn_jax import _program
from cudnn_jax.engines.kernels import CubinImage, CuteObject
from cudnn_jax.engines.program import ProgramBuilder, immediate
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import data_type, pygraph

IMAGE, OBJECT = b"an image" * 100, b"an object"


@pytest.fixture(scope="module")
def artifact() -> bytes:
    graph = pygraph(io_data_type=data_type.BFLOAT16, compute_data_type=data_type.FLOAT)
    a = graph.tensor(dim=[4, 8], stride=[8, 1])
    out = graph.relu(a)
    out.set_output(True)
    builder = ProgramBuilder(graph, Target("cuda", sm=90))
    args = [builder.operand(a), builder.operand(out), ("workspace", builder.workspace(64)), immediate(0.5, "float32")]
    builder.step("fill", dest=builder.operand(out), value=0, width=1, bytes=64)
    builder.cubin(CubinImage(IMAGE, "relu_kernel"), (7, 2, 1), args)
    builder.cute(CuteObject(OBJECT, "relu_function", "4.8.1"), args[:2])
    return builder.build().data


@pytest.fixture
def file(artifact: bytes, tmp_path: Path) -> Path:
    made = tmp_path / "one.program"
    made.write_bytes(artifact)
    made.chmod(0o644)
    return made


def show(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cudnn_jax", "program", "show", *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "160", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_table_names_needs_operands_and_steps(file: Path, artifact: bytes) -> None:
    done = show(file)
    assert done.returncode == 0, done.stderr
    wanted = ["platform cuda, arch 90, cutedsl 4.8.1", "bfloat16", "4x8", "64 bytes", "relu_kernel", "grid: 7, 2, 1"]
    wanted += ["relu_function", "immediate float32 0.5", "workspace 0", f"version 1, {len(artifact)} bytes"]
    wanted += [hashlib.sha256(content).hexdigest()[:16] for content in (IMAGE, OBJECT)]
    for text in wanted:
        assert text in done.stdout, text


def test_json_holds_the_whole_program(file: Path) -> None:
    done = show("--json", file)
    content = json.loads(done.stdout)
    assert content["requires"] == {"platform": "cuda", "arch": 90, "cudnn": None, "cutedsl": "4.8.1"}
    assert content["inputs"] == content["outputs"] == [{"dtype": "bfloat16", "shape": [4, 8]}]
    assert [step["kind"] for step in content["steps"]] == ["fill", "cubin", "cute"]
    assert content["steps"][1]["image"] == {"bytes": len(IMAGE), "sha256": hashlib.sha256(IMAGE).hexdigest()}
    assert content["steps"][1]["args"][3] == ["immediate", ["float32", 0.5]]


def test_what_is_no_program_is_one_line_and_exit_code_1(
    artifact: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = artifact.replace(b"\xa7version\x01", b"\xa7version\x02", 1)
    assert newer != artifact
    cases = {
        "damaged": (artifact[:-1] + bytes([artifact[-1] ^ 1]), "artifact.sha256: does not match the payload"),
        "cut": (artifact[:100], "artifact: not valid MessagePack"),
        "newer": (newer, "artifact.version: 2, this build reads version 1; a newer cudnn_jax made it"),
        "other": (b"hello", "artifact: not valid MessagePack"),
    }
    for name, (data, message) in cases.items():
        (tmp_path / name).write_bytes(data)
        assert _program.main(file=str(tmp_path / name)) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith(f"{tmp_path / name}: {message}")
    assert _program.main(file=str(tmp_path / "nothing")) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'nothing'}: No such file or directory\n"
    assert show(tmp_path / "newer").returncode == 1


def test_a_file_that_others_can_write_is_shown_with_a_warning(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.chmod(0o666)
    assert _program.main(file=str(file), as_json=True) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["version"] == 1
    assert err.startswith(f"warning: {file}: ") and "has mode 0666" in err and "a program is code" in err
