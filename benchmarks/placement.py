"""`python -m benchmarks placement`: the order of engines, cell by cell, from the newest results of this folder.

Writes `engines/<room>/placement.json`. `--measure` runs the benchmarks on this machine's GPU first.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import RESULTS

ENGINES = Path(__file__).parents[1] / "engines"


@dataclasses.dataclass(frozen=True)
class Cell:
    """What a graph's facts must be (see `engines.placement`), and which rows of a benchmark's results are of it."""

    where: Mapping[str, Any]
    direction: str
    case: str = ""
    """Cases whose name holds this text."""


FORWARD, BACKWARD = Cell({"direction": "fwd"}, "forward"), Cell({"direction": "bwd"}, "backward")
ROOMS: dict[str, tuple[str, tuple[Cell, ...]]] = {
    "sdpa": ("sdpa", (FORWARD, Cell({"direction": "bwd"}, "forward+backward"))),
    "norm": ("norm", (FORWARD, BACKWARD)),
    "pointwise": ("pointwise", (Cell({}, "forward"),)),
    "linear_attention": (
        "gdn",
        (
            Cell({"direction": "fwd", "mean_length": [0, 2]}, "forward", "decode 256 x 1,"),
            Cell({"direction": "fwd", "mean_length": [2, 16]}, "forward", "decode 256 x 8,"),
        ),
    ),
}
"""Room -> its benchmark, and its cells."""


def engine_of(plan: str) -> str:
    """The engine of a plan, or of the backward's where a forward's stands before it."""
    return plan.rpartition(" + ")[2].partition(":")[0].partition("/")[0]


def best_times(rows: list[dict[str, Any]], cell: Cell) -> dict[str, dict[str, float]]:
    """Case -> engine -> milliseconds of its fastest plan."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["direction"] == cell.direction and cell.case in row["case"]:
            times = found.setdefault(row["case"], {})
            engine = engine_of(row["plan"])
            times[engine] = min(row["ms"], times.get(engine, math.inf))
    return found


def order_of(times: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Engines by the geometric mean of their times over the cases that all of them ran, the fastest first.

    None where no case was run by all.
    """
    engines = {engine for case in times.values() for engine in case}
    shared = [case for case in times.values() if set(case) == engines]
    if not shared:
        return []
    mean = {engine: sum(math.log(case[engine]) for case in shared) for engine in engines}
    return sorted(engines, key=lambda engine: (mean[engine], engine))


def newest(benchmark: str, folder: Path) -> Path | None:
    return max(folder.glob(f"{benchmark}-[0-9]*.json"), default=None)


def cells(path: Path, wanted: tuple[Cell, ...]) -> Iterator[dict[str, Any]]:
    rows = json.loads(path.read_text())["rows"]
    for cell in wanted:
        times = best_times(rows, cell)
        if order := order_of(times):
            yield {"where": dict(cell.where), "order": order, "ms": times}


def write(room: str, path: Path, wanted: tuple[Cell, ...]) -> Path:
    content = json.loads(path.read_text())
    made = {
        "from": f"benchmarks/results/{path.parent.name}/{path.name}",
        "device": content["device"],
        "versions": content["versions"],
        "cells": list(cells(path, wanted)),
    }
    target = ENGINES / room / "placement.json"
    target.write_text(json.dumps(made, indent=1) + "\n")
    return target


def main(argv: list[str]) -> int:
    """The exit status: 1 if a room has no results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks placement", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="run the benchmarks first, on this machine's GPU")
    parser.add_argument("--results", type=Path, default=RESULTS / "nvidia-h200", help="folder of results")
    args = parser.parse_args(argv)
    console, missing = Console(), 0
    for room, (benchmark, wanted) in ROOMS.items():
        if args.measure:
            importlib.import_module(f"benchmarks.{benchmark}").main(["--out", str(args.results)])
        path = newest(benchmark, args.results)
        if path is None:
            console.print(f"{room}: no results of `python -m benchmarks {benchmark}` in {args.results}")
            missing += 1
            continue
        for cell in json.loads(write(room, path, wanted).read_text())["cells"]:
            console.print(f"{room} {cell['where']}: {', '.join(cell['order'])} ({path.name})", highlight=False)
    return int(missing > 0)
