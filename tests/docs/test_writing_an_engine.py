"""docs/writing_an_engine.md: its excerpts are the sources' lines, its files exist, its examples run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "writing_an_engine.md").read_text()
BLOCKS = re.findall(r"<!-- (from: \S+|run) -->\n```python\n(.*?)```", GUIDE, re.DOTALL)
EXCERPTS = [(how.removeprefix("from: "), text) for how, text in BLOCKS if how != "run"]
EXAMPLES = [text for how, text in BLOCKS if how == "run"]


def pieces(excerpt: str) -> list[str]:
    """The runs of lines between lines that are only dots."""
    return [piece.strip("\n") for piece in re.split(r"^ *\.\.\.$", excerpt, flags=re.MULTILINE)]


def test_every_code_block_is_an_excerpt_or_an_example() -> None:
    assert len(BLOCKS) == GUIDE.count("```python") == GUIDE.count("```") / 2
    assert len(EXCERPTS) >= 7 and len(EXAMPLES) == 2


@pytest.mark.parametrize("at", range(len(EXCERPTS)))
def test_an_excerpt_is_in_its_source(at: int) -> None:
    file, excerpt = EXCERPTS[at]
    source = (ROOT / file).read_text()
    position = 0
    for piece in pieces(excerpt):
        found = source.find(f"\n{piece}\n", position)
        assert found >= 0, f"{file} does not hold, in this order:\n{piece}"
        position = found + len(piece)


def test_every_file_that_is_named_exists() -> None:
    named = set(re.findall(r"`((?:engines|tests|benchmarks|docs)/[\w/.]*\w)`", GUIDE))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl compiles the example")
def test_the_examples_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    for example in EXAMPLES:
        exec(example, scope)
    told = capsys.readouterr().out
    for comment in re.findall(r"# (cutedsl_bias_gelu\S+)", GUIDE):
        assert comment in told
    assert "90 ['cute']" in told
