"""The code of README.md and of the pages runs as it stands there, on smaller arrays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import cudnn_jax
from cudnn_jax.engines.store import Store

ROOT = Path(__file__).parents[2]
SMALLER = {"8192": "32", "4096": "64", "1024": "16"}


def blocks(page: str) -> list[str]:
    """The indented Python of a page: what starts with an import or an assignment."""
    text = (ROOT / page).read_text()
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.MULTILINE)
    code = [re.sub(r"^    ", "", block, flags=re.MULTILINE).strip() for block in found]
    return [block for block in code if re.match(r"import |\w+ = ", block)]


def run(code: list[str]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in code:
        exec(compile(block, "page", "exec"), names)
    return names


def test_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(blocks("README.md"))
    assert names["dq"].shape == names["q"].shape
    assert "sdpa_bwd" in capsys.readouterr().out
    assert names["out"].shape == names["x"].dim


def test_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(blocks("docs/graphs.md"))
    assert names["out"].shape == (8, 64, 1, 1)
    assert "conv_fprop 'conv'" in capsys.readouterr().out


def test_autotuning(capsys: pytest.CaptureFixture[str]) -> None:
    code, *_ = blocks("docs/caches.md")
    run([code])
    assert "sdpa_bwd, bwd bfloat16" in capsys.readouterr().out


def test_several_devices(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(blocks("docs/sharding.md"))
    assert names["dq"].sharding == names["q"].sharding
    assert "sdpa_bwd" in capsys.readouterr().out


def test_programs_ahead_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    *_, code = blocks("docs/caches.md")
    run([code])
    assert list((tmp_path / "programs").rglob("plans/*")) and Store(tmp_path / "programs") is not None
    assert "h200" in cudnn_jax.aot.known_targets()
