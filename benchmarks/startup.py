"""`python -m benchmarks startup`: what importing, ranking, tracing and planning cost the host, in fresh processes.

Beside each figure stands what the same costs the first time in a process, so that nothing is only put off. On a machine
without a GPU it plans for an H200, for which cuDNN needs some libcuda.
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

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.report import write_json
from cudnn_jax._measure import half_iqr

AIMS = {
    "import": 60.0,
    "rank, Python engines": 2.0,
    "trace that hits the cache, per operation": 3.0,
    "cold cuDNN plan": 1500.0,
}
"""Milliseconds to stay under: the import's beyond `import jax`, the trace's beyond an empty custom call."""


ROOT = Path(__file__).parents[1]


def process(cache: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.startup_process"],
        cwd=ROOT,
        env={**os.environ, "CUDNN_JAX_CACHE_DIR": cache},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"a process failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(processes: int) -> list[dict[str, Any]]:
    """One row a figure: median and half interquartile range over processes that share a filled cache."""
    with tempfile.TemporaryDirectory() as cache:
        process(cache)  # fills the cache, and the file cache
        found = [process(cache) for _ in range(processes)]
    missed = sum(each["missed"] for each in found)
    if missed:
        raise RuntimeError(f"{missed} operations were not found in the cache: the trace's figure would be of planning")
    rows = []
    for name in found[0]["took"]:
        values = np.asarray([each["took"][name] for each in found])
        row = {"name": name, "ms": float(np.median(values)), "spread": half_iqr(values)}
        rows.append({**row, "aim": AIMS.get(name)})
    return rows


def main(argv: list[str]) -> int:
    """The exit status: 1 if a figure misses its aim."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks startup", description=__doc__)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--out", type=Path, help="folder for the JSON (default benchmarks/results/<device>)")
    args = parser.parse_args(argv)
    rows = measure(args.processes)
    table = Table(title=f"startup, medians of {args.processes} processes", title_justify="left")
    for heading in ("what", "ms", "spread", "aim"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for row in rows:
        aim = "" if row["aim"] is None else f"{row['aim']:g}"
        table.add_row(row["name"], f"{row['ms']:.3g}", f"{row['spread']:.2g}", aim)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for name in AIMS.keys() - {row["name"] for row in rows}:
        console.print(f"left out: {name}: cuDNN cannot plan here, `python -m cudnn_jax doctor` says why")
    path = write_json("startup", {"processes": args.processes, "rows": rows}, args.out)
    console.print(f"written to {path}", highlight=False)
    return int(any(row["aim"] is not None and row["ms"] > row["aim"] for row in rows))
