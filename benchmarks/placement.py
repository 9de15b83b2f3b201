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


def _decoding(operation: str) -> tuple[Cell, ...]:
    """Forwards of short sequences, by their mean length."""
    case = "decode 256 x {}," if operation == "gdn" else f"{operation} decode 256 x {{}},"
    return tuple(
        Cell({"operation": operation, "direction": "fwd", "mean_length": lengths}, "forward", case.format(tokens))
        for lengths, tokens in (([0, 2], 1), ([2, 16], 8))
    )


ROOMS: dict[str, dict[str, tuple[Cell, ...]]] = {
    "sdpa": {"sdpa": (FORWARD, Cell({"direction": "bwd"}, "forward+backward"))},
    "norm": {"norm": (FORWARD, BACKWARD)},
    "pointwise": {"pointwise": (Cell({}, "forward"),)},
    "linear_attention": {"gdn": _decoding("gdn"), "kda": (*_decoding("kda"), *_decoding("gdn2"))},
}
"""Room -> benchmark -> the cells that its results fill."""


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


def source(path: Path) -> str:
    """How a file of results is named in what is made of it."""
    return f"benchmarks/results/{path.parent.name}/{path.name}"


def cells(path: Path, wanted: tuple[Cell, ...]) -> Iterator[dict[str, Any]]:
    rows = json.loads(path.read_text())["rows"]
    for cell in wanted:
        times = best_times(rows, cell)
        if order := order_of(times):
            yield {"where": dict(cell.where), "order": order, "ms": times, "from": source(path)}


def write(room: str, paths: Mapping[str, Path]) -> Path:
    """A room's file, of the results of its benchmarks."""
    results = {source(path): json.loads(path.read_text()) for path in paths.values()}
    made = {
        "measured": {name: {key: result[key] for key in ("device", "versions")} for name, result in results.items()},
        "cells": [cell for name, path in paths.items() for cell in cells(path, ROOMS[room][name])],
    }
    target = ENGINES / room / "placement.json"
    target.write_text(json.dumps(made, indent=1) + "\n")
    return target


def main(argv: list[str]) -> int:
    """The exit status: 1 if a benchmark has no results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks placement", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="run the benchmarks first, on this machine's GPU")
    parser.add_argument("--results", type=Path, default=RESULTS / "nvidia-h200", help="folder of results")
    args = parser.parse_args(argv)
    console, missing = Console(), 0
    for room, benchmarks in ROOMS.items():
        if args.measure:
            for benchmark in benchmarks:
                importlib.import_module(f"benchmarks.{benchmark}").main(["--out", str(args.results)])
        found = {benchmark: path for benchmark in benchmarks if (path := newest(benchmark, args.results))}
        lacking = sorted(benchmarks.keys() - found)
        for benchmark in lacking:
            console.print(f"{room}: no results of `python -m benchmarks {benchmark}` in {args.results}")
            missing += 1
        if lacking:  # a room's file holds all of its cells
            continue
        for cell in json.loads(write(room, found).read_text())["cells"]:
            console.print(f"{room} {cell['where']}: {', '.join(cell['order'])} ({cell['from']})", highlight=False)
    return int(missing > 0)
