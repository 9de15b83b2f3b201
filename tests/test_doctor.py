"""`python -m cudnn_jax doctor` says what is there and what is missing, and fails only for what is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cudnn_jax import _doctor
from cudnn_jax.engines.base import PlanConfig
from cudnn_jax.engines.store import Store, Stored


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cudnn_jax", "doctor", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "160"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_table_names_every_item() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    for item in ("Python", "JAX", "XLA handlers", "GPU in JAX", "CUDA driver", "cuDNN", "CuTe-DSL", "cuTile", "Flax"):
        assert item in done.stdout


def test_json_holds_one_finding_an_item() -> None:
    findings = {finding["item"]: finding for finding in json.loads(run("--json").stdout)}
    assert findings["cudnn-jax"]["status"] == findings["XLA handlers"]["status"] == "ok"
    assert findings["GPU in JAX"]["status"] == "missing"
    assert all(finding["status"] in ("ok", "missing", "broken") for finding in findings.values())


@pytest.mark.parametrize(("item", "module"), [("CuTe-DSL", "cutedsl"), ("cuTile", "cutile")])
def test_a_compiler_that_cannot_serve_says_why(item: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ImportError("the compiler 1.0, at least 2.0 is needed")

    def finding() -> _doctor.Finding:
        return next(found for found in _doctor.examine() if found.item == item)

    assert finding().status == "ok"
    monkeypatch.setattr(f"cudnn_jax.engines.{module}.available", refuse)
    assert (finding().status, finding().found) == ("missing", "the compiler 1.0, at least 2.0 is needed")


def test_the_cache_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finding() -> _doctor.Finding:
        return next(found for found in _doctor.examine() if found.item == "cache")

    assert finding().status == "missing"  # the tests switch it off
    monkeypatch.setenv("CUDNN_JAX_CACHE_DIR", str(tmp_path))
    store = Store(tmp_path)
    assert (finding().status, finding().found) == ("ok", f"{store.folder}: 0 plans, 0.0 MiB, 0 autotune records")
    plan = PlanConfig(3, (), engine="cudnn", kind="cudnn")
    store.store("key", Stored(plan, (plan,), (), bytes(3 << 20), False))
    store.store_record("key", {})
    assert finding().found == f"{store.folder}: 1 plans, 3.0 MiB, 1 autotune records"
    store.folder.chmod(0o777)
    assert finding().status == "broken" and "0777" in finding().found


def test_what_is_broken_is_said_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise RuntimeError("jaxlib speaks XLA FFI 0.1")

    monkeypatch.setattr("cudnn_jax._runtime.register", refuse)
    assert _doctor.main(as_json=True) == 1
    findings = {finding["item"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert (findings["XLA handlers"]["status"], findings["XLA handlers"]["found"]) == (
        "broken",
        "jaxlib speaks XLA FFI 0.1",
    )


def test_versions_read_as_people_write_them() -> None:
    assert (_doctor._dotted(91900), _doctor._dotted(13020)) == ("9.19.0", "CUDA 13.2")
