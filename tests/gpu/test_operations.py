"""Each operation on cuDNN's plan, in a process of its own; what cuDNN declines is listed with its reason.

`CUDNN_JAX_RESULTS=FOLDER` has a table of what ran, was declined or failed written there, `operations.json`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import pytest

from gpu.running import child
from support import operations

DECLINES = json.loads((Path(__file__).parent / "operation_declines.json").read_text())
AT_ONCE = 8
ENVIRONMENT = {"CUDNN_JAX_CUDNN_UNPROVEN": "1"}


def run(name: str) -> dict[str, Any]:
    """What `operation_once` found and the seed, or {"failed": how the process ended}."""
    seed = int(os.environ.get("CUDNN_JAX_TEST_SEED", secrets.randbits(32)))
    try:
        printed = child("gpu.operation_once", name, str(seed), environment=ENVIRONMENT)
        found = json.loads(printed.splitlines()[-1])
    except (AssertionError, TimeoutExpired) as error:
        found = {"failed": str(error)}
    return {"seed": seed, **found}


def in_words(found: dict[str, Any]) -> str:
    """A line of the table."""
    if "failed" in found:
        lines = [line.strip() for line in found["failed"].splitlines() if line.strip()]
        return f"failed: {next((line for line in reversed(lines) if 'Error' in line), lines[-1])[:300]}"
    if "declined" in found:
        return f"declined: {' '.join(found['declined'].split())}"
    errors = ", ".join(f"{port} {error:.1e}" for port, error in found["errors"].items())
    return f"{'failed:' if too_large(found) else 'ran,'} errors {errors}"


def too_large(found: dict[str, Any]) -> dict[str, float]:
    return {port: error for port, error in found["errors"].items() if not error <= found["limits"][port]}


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, Any]]]:
    """What was found of each operation that a test here asks for."""
    ours = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = list(dict.fromkeys(item.callspec.params["name"] for item in ours))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(names, pool.map(run, names), strict=True))
    if folder := os.environ.get("CUDNN_JAX_RESULTS"):
        table = {name: in_words(each) for name, each in found.items()}
        (Path(folder) / "operations.json").write_text(json.dumps(table, indent=1) + "\n")
    yield found


@pytest.mark.parametrize("name", [name for name in operations.ALL if name not in DECLINES])
def test_an_operation_on_cudnn(name: str, told: dict[str, dict[str, Any]]) -> None:
    assert "errors" in told[name], told[name]
    assert not too_large(told[name]), told[name]


@pytest.mark.parametrize("name", DECLINES)
def test_what_cudnn_declines_runs_on_the_reference(name: str, told: dict[str, dict[str, Any]]) -> None:
    assert "cannot serve" in told[name].get("declined", ""), told[name]
    assert told[name]["finite"] in (True, None)
