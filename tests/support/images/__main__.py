"""`python -m support.images`: builds the DSL engines' images and compares what they take with the table."""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from rich.console import Console
from rich.table import Table

from support.images import build, table
from support.images.build import Built, Job

ALWAYS = 90
"""The compute capability that is built even where nothing changed."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make check", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write what was found into the table")
    parser.add_argument("--changed", action="store_true", help=f"only what changed since the table, and sm_{ALWAYS}")
    args = parser.parse_args()
    began = time.perf_counter()
    known = table.read()
    chosen = every = build.jobs()
    if args.changed:
        keys = {name: entry["key"] for name, entry in known["images"].items()}
        chosen = [job for job in every if job.sm == ALWAYS or keys.get(job.name) != build.key(job)]
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = dict(zip(chosen, pool.map(build.build, chosen), strict=True))
    if args.update:
        known = table.updated(known, found, every, build.compilers())
        table.write(known)
    show(found)
    lines = table.problems(known, found, every=len(chosen) == len(every))
    for line in lines:
        print(line, file=sys.stderr)
    seconds = time.perf_counter() - began
    print(f"{len(found)} of {len(every)} sets of images in {seconds:.0f} s, {len(lines)} problems")
    return 1 if lines else 0


def show(found: dict[Job, Built]) -> None:
    """What the plan that is ranked first takes, one row a kernel."""
    shown = Table(title="images of the plans ranked first", title_justify="left")
    for heading in ("graph", "for", "kernel"):
        shown.add_column(heading, overflow="fold")
    for heading in table.FIELDS:
        shown.add_column(heading, justify="right")
    for job, built in found.items():
        for name, numbers in built.plans[0][1].items():
            shown.add_row(job.sample, f"sm_{job.sm}", name[:40], *map(str, numbers))
    Console(width=None if sys.stdout.isatty() else 160).print(shown)


if __name__ == "__main__":
    sys.exit(main())
