"""Which engine leads is data, with the measurement that it came from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import placement as remeasure
from cudnn_jax.engines import manifest, placement, ranking
from cudnn_jax.engines.base import PlanConfig
from cudnn_jax.engines.target import named

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "engines").glob("*/placement.json"))


def plans(*names: str) -> list[PlanConfig]:
    return [PlanConfig(at, engine=name) for at, name in enumerate(names)]


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    held: list[dict[str, Any]] = [
        {"where": {"direction": "fwd", "length": [0, 8]}, "order": ["b", "a"]},
        {"where": {"direction": "fwd", "length": [8, None]}, "order": ["a", "b", "c"]},
    ]
    monkeypatch.setattr(placement, "cells", lambda room: held)
    return held


@pytest.mark.parametrize(
    ("direction", "length", "wanted"),
    [
        ("fwd", 0, "b x b a c"),
        ("fwd", 7, "b x b a c"),
        ("fwd", 8, "a x b b c"),
        ("bwd", 7, "b x a b c"),
    ],
)
def test_measured_engines_take_their_places_among_themselves(
    cells: Any, direction: str, length: int, wanted: str
) -> None:
    facts = SimpleNamespace(direction=direction, length=length)
    listed = plans("b", "x", "a", "b", "c")
    arranged = placement.arrange("room", facts, listed)
    assert " ".join(plan.engine for plan in arranged) == wanted
    assert [plan.engine_id for plan in arranged if plan.engine == "b"] == [0, 3]  # its own order stays


def test_a_room_without_a_file_keeps_its_order() -> None:
    assert placement.cells("nowhere") == []


def test_the_hook_gives_the_measured_order(cells: Any) -> None:
    facts = SimpleNamespace(direction="fwd", length=1)
    made = ranking.measured("room")(("A",), facts, plans("a", "b", "xla"), [], named("h200"))
    assert [plan.engine for plan in made] == ["b", "a", "xla"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_each_file_is_what_its_measurement_gives(path: Path) -> None:
    held = json.loads(path.read_text())
    room = path.parent.name
    benchmarks = {Path(name).name.partition("-")[0]: ROOT / name for name in held["measured"]}
    wanted = remeasure.ROOMS[room]
    assert benchmarks.keys() == wanted.keys()
    assert held["cells"] == [
        cell for name, measured in benchmarks.items() for cell in remeasure.cells(measured, wanted[name])
    ]
    engines = {
        slot.name
        for family in manifest.FAMILIES.values()
        if family.analyzer[0].endswith(f".{room}.facts")
        for slot in family.slots
    }
    assert {name for cell in held["cells"] for name in cell["order"]} <= engines | {"cudnn"}
    assert {cell["from"] for cell in held["cells"]} <= held["measured"].keys()
    assert all({"device", "versions"} <= set(each) for each in held["measured"].values())


def test_there_are_files() -> None:
    assert {"norm", "pointwise", "sdpa"} <= {path.parent.name for path in FILES} <= set(remeasure.ROOMS)


def test_the_order_is_by_time_over_the_cases_that_all_ran() -> None:
    def row(case: str, plan: str, ms: float, direction: str = "forward") -> dict[str, Any]:
        return {"case": case, "plan": plan, "ms": ms, "direction": direction}

    rows = [
        *(row("x", "slow:rows=1", 9.0), row("x", "slow:rows=2", 2.0), row("x", "fast/3:k=1", 1.0)),
        *(row("y", "slow:rows=1", 3.0), row("y", "fast/4", 2.0), row("y", "fast/4", 90.0, "backward")),
        row("z", "slow:rows=1", 0.001),
    ]
    times = remeasure.best_times(rows, remeasure.FORWARD)
    assert times == {"x": {"slow": 2.0, "fast": 1.0}, "y": {"slow": 3.0, "fast": 2.0}, "z": {"slow": 0.001}}
    assert remeasure.order_of(times) == ["fast", "slow"]
    assert remeasure.order_of({"x": {"a": 1.0}, "y": {"b": 2.0}}) == []
    assert remeasure.engine_of("cudnn/1:k=2 + xla") == "xla"
