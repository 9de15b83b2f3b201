"""`python -m benchmarks autotune`: attention autotuned at the shapes of `benchmarks sdpa`, replayed by a new process.

Both use a plan database of their own, in a folder that is dropped. The exit status is 1 if the new process would run
another plan than the one that was chosen, or does not take a recorded one from the database.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import cudnn_jax
from benchmarks import harness, report, sdpa
from benchmarks.harness import Function
from cudnn_jax.engines.cache import CACHE_VARIABLE

ROOT = Path(__file__).parents[1]


def traced(quick: bool, only: str) -> list[tuple[sdpa.Case, str, Function]]:
    """What both processes trace: (case, direction, function of query, key, value and the result's cotangent)."""
    found: list[tuple[sdpa.Case, str, Function]] = []
    for case in (case for case in sdpa.cases(quick) if only in str(case)):
        found.append((case, sdpa.FORWARD_ONLY, sdpa.forward_plan(case, None)))
        found.append((case, sdpa.BOTH, sdpa.both_plans(case, None, None)))
    return found


def tune(quick: bool, only: str, seed: int, console: Console) -> list[dict[str, Any]]:
    rows = []
    for case, direction, fn in traced(quick, only):
        for row in cudnn_jax.autotune(fn, *sdpa.draw(case, seed)).rows:
            rows.append({"case": str(case), "direction": direction, **row})
            console.print(f"{case}, {direction}, {row['operation']}: {row['chosen']}", highlight=False)
        harness.free_memory()
    return rows


def replay(quick: bool, only: str) -> list[dict[str, Any]]:
    """What a process that only plans would run, in the order of `tune`."""
    rows = []
    for case, direction, fn in traced(quick, only):
        shapes = jax.eval_shape(lambda case=case: sdpa.draw(case, 0))
        for row in cudnn_jax.explain(fn, *shapes).rows:
            told = {name: row[name] for name in ("operation", "plan", "origin")}
            rows.append({"case": str(case), "direction": direction, **told})
    return rows


def in_new_process(quick: bool, only: str) -> list[dict[str, Any]]:
    words = ["--replay", "--only", only, *(["--quick"] if quick else [])]
    # This process may hold most of the device's memory.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "benchmarks", "autotune", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def compare(tuned: list[dict[str, Any]], replayed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `tune`, each with what the new process would run and whether that is what was chosen."""
    rows = []
    for row, again in zip(tuned, replayed, strict=True):
        assert [row[name] for name in ("case", "direction", "operation")] == list(again.values())[:3]
        found = again["origin"].startswith("autotune record") or not row["recorded"]
        same = found and again["plan"] == row["chosen"]
        rows.append({**row, "replayed": again["plan"], "origin": again["origin"], "same": same})
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title=f"autotune on {jax.devices()[0].device_kind}", title_justify="left")
    for heading in ("case", "direction", "operation", "ranked first", "ms", "chosen", "ms", "plans", "a new process"):
        made.add_column(heading, justify="right" if heading == "ms" else "left", overflow="fold")
    for row in rows:
        ms = {plan["plan"]: plan["ms"] for plan in row["plans"]}
        verdicts = [plan["verdict"] for plan in row["plans"]]
        told = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
        made.add_row(
            *(row[name] for name in ("case", "direction", "operation", "ranked")),
            _digits(ms[row["ranked"]]),
            row["chosen"] or "none",
            _digits(ms.get(row["chosen"])),
            told,
            f"{'same' if row['same'] else 'NOT REPLAYED: ' + row['replayed']} ({row['origin']})",
        )
    return made


def _digits(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.4g}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks autotune", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny cases: a check of the benchmark, not of speed")
    parser.add_argument("--out", type=Path, help="folder for the JSON (default benchmarks/results/<device>)")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--seed", type=int, help="of the random inputs (default: a fresh one)")
    parser.add_argument("--replay", action="store_true", help="print what would run, as the new process does")
    args = parser.parse_args(argv)
    if args.replay:
        print(json.dumps(replay(args.quick, args.only)))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 200)
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if args.seed is None else args.seed
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = folder
        tuned = tune(args.quick, args.only, seed, console)
        rows = compare(tuned, in_new_process(args.quick, args.only))
    console.print(table(rows))
    same = sum(row["same"] for row in rows)
    console.print(f"a new process runs what was chosen in {same} of {len(rows)} operations")
    path = report.write_json("autotune", {"seed": seed, "same": same, "rows": rows}, args.out)
    console.print(f"written to {path}", highlight=False)
    return 0 if rows and same == len(rows) else 1
