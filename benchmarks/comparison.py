"""The run of a benchmark of plans beside peers: its command line, its cases one by one, the rows of a comparison."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from benchmarks import harness
from benchmarks.harness import Effort, Function
from benchmarks.report import Report
from benchmarks.verification import verify


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Candidates of one case and direction, all of the same arguments.

    `ours` and `peers` are by name, `chosen` is the plan of ours that runs by default, and `want` holds the right
    results in the order in which a candidate returns them, `tolerance` the relative error allowed for each.
    """

    case: str
    direction: str
    arguments: tuple[jax.Array, ...]
    ours: Mapping[str, Function]
    peers: Mapping[str, Function]
    chosen: str
    want: Mapping[str, jax.Array]
    tolerance: Mapping[str, float]
    work: tuple[float, float]
    """Floating-point operations, and bytes moved at least."""

    def run(self, report: Report, effort: Effort, seed: int) -> None:
        """Adds a row for each plan of ours that is right, and to the report's lists why the others are not timed."""
        where = {"case": self.case, "direction": self.direction}
        verified = verify(self.ours, self.peers, self.arguments, self.want, self.tolerance, effort.threads)
        report.left_out += [{**where, "name": name, "reason": reason} for name, reason in verified.left_out.items()]
        report.wrong += [{**where, "name": name, "reason": reason} for name, reason in verified.wrong.items()]
        timings = harness.interleave(verified.compiled, self.arguments, effort, seed)
        beside = {name: timings[name] for name in self.peers if name in timings}
        for name in self.ours:
            if name in timings:
                report.add(
                    timings[name],
                    beside,
                    plan=name,
                    clock="wall",
                    chosen=name == self.chosen,
                    roofline_ms=report.ceilings.roofline_ms(*self.work),
                    error=verified.errors[name],
                    **where,
                )


RunCase = Callable[[Any, Report, Effort, int], None]
"""(case, report, effort, seed): adds the case's rows."""


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """`python -m benchmarks <name>`. `last` adds rows behind those of the cases."""

    name: str
    summary: str | None
    cases: Sequence[Any]
    quick_cases: Sequence[Any]
    run_case: RunCase
    last: Callable[[Report, Effort, int], None] = lambda report, effort, seed: None

    def main(self, argv: list[str]) -> int:
        """The exit status: 1 if something of ours was wrong, or no case was asked for."""
        args = self._arguments(argv)
        console = Console(width=None if sys.stdout.isatty() else 200)
        seed = int(np.random.SeedSequence().generate_state(1)[0]) if args.seed is None else args.seed
        effort = Effort(rounds=5, window_ms=2.0, threads=args.threads) if args.quick else Effort(threads=args.threads)
        cases = [case for case in (self.quick_cases if args.quick else self.cases) if args.only in str(case)]
        report = Report(self.name, seed, harness.measure_ceilings(args.quick))
        for case in cases:
            began = time.perf_counter()
            self.run_case(case, report, effort, seed)
            harness.free_memory()
            # After every case, so that a run that is cut short leaves what it found.
            report.write(args.out)
            console.print(f"{case}: {time.perf_counter() - began:.1f} s")
        self.last(report, effort, seed)
        report.show(console)
        path = report.write(args.out)
        console.print(f"written to {path}", highlight=False)
        return 1 if report.wrong or not cases else 0

    def _arguments(self, argv: list[str]) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks {self.name}", description=self.summary)
        parser.add_argument("--quick", action="store_true", help="tiny cases: a check of the benchmark, not of speed")
        parser.add_argument("--out", type=Path, help="folder for the JSON (default benchmarks/results/<device>)")
        parser.add_argument("--only", default="", help="cases whose name holds this text")
        parser.add_argument("--seed", type=int, help="of the random inputs (default: a fresh one)")
        parser.add_argument("--threads", type=int, default=6, help="compilations at a time (default 6)")
        return parser.parse_args(argv)
