"""`cudnn_jax.autotune`: every plan of every operation of a function timed on this device, the fastest kept for later.

A plan is timed only when it is right: its results on random data are compared with the reference engine's first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cudnn_jax import _target
from cudnn_jax._measure import Effort, Timing, interleave, one_line, poison, relative_error, rotated
from cudnn_jax._printed import Printed
from cudnn_jax._sites import Site, sites
from cudnn_jax.engines import planning, records
from cudnn_jax.engines.base import DECLINES, Artifact, PlanConfig
from cudnn_jax.engines.planner import Planner, Request
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError
from cudnn_jax.ops._primitive import with_artifact

EFFORT = Effort(rounds=15, window_ms=5.0, slow_factor=3.0, slow_rounds=3)
NOISE = 0.01
"""Plans that differ by less are equally fast, however quiet the run was."""
TOLERANCE = {"float64": 1e-8, "float32": 5e-3, "float16": 5e-3, "bfloat16": 2e-2}
"""Relative error that rounding explains, by the coarsest operand. A GPU may multiply float32 in 10 bits."""
COARSE = 0.25
"""The same for narrower floats."""


@dataclass(frozen=True)
class AutotuneResult(Printed):
    """What was timed: one row for each distinct operation, in the order of the traced function.

    Each row is a dict with `operation`, `count`, `facts`, `family`, `ranked` (the plan that the ranking runs), `chosen`
    (the fastest; None if nothing could be timed), `recorded` (whether a record was made), `against` (the plan whose
    results were taken for right), `notes`, `declines` ([engine, reason] pairs of engines without a plan), and `plans`
    in ranked order: dicts of `plan`, `verdict` ("timed", "declined", "wrong" or "failed"), `ms` (median), `spread`
    (half the interquartile range), `error` (the largest relative error of a result) and `reason`.
    """

    target: str
    rows: tuple[Mapping[str, Any], ...]

    def to_json(self) -> str:
        return json.dumps({"target": self.target, "rows": list(self.rows)}, indent=1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.rows:
            yield f"no operation of cudnn_jax on {self.target}"
        for row in self.rows:
            times = f" x{row['count']}" if row["count"] > 1 else ""
            kept = "* chosen, " + ("recorded" if row["recorded"] else "not recorded")
            table = Table(
                title=escape(f"{row['operation']}{times}, {row['facts']} on {self.target}"),
                title_justify="left",
                caption=escape("; ".join([kept if row["chosen"] else "nothing chosen", *row["notes"]])),
                caption_justify="left",
            )
            table.add_column("plan, as ranked", overflow="fold")
            for heading in ("ms", "spread", "error"):
                table.add_column(heading, justify="right", no_wrap=True)
            table.add_column("", overflow="fold")
            for plan in row["plans"]:
                table.add_row(
                    plan["plan"] + (" *" if plan["plan"] == row["chosen"] else ""),
                    *("" if plan[name] is None else f"{plan[name]:.4g}" for name in ("ms", "spread", "error")),
                    escape(_remark(plan)),
                )
            for engine, reason in row["declines"]:
                table.add_row(engine, "", "", "", escape(f"declined: {reason}"))
            yield table


def _remark(plan: Mapping[str, Any]) -> str:
    if plan["verdict"] == "timed":
        return ""
    return plan["verdict"] + (f": {plan['reason']}" if plan["reason"] else "")


@dataclass
class _Trial:
    """What is found out about one plan."""

    plan: PlanConfig
    build: Callable[[], Artifact]
    verdict: str = "untimed"
    reason: str | None = None
    run: Callable[..., Sequence[jax.Array]] | None = None
    error: float | None = None
    timing: Timing | None = None

    def give_up(self, verdict: str, reason: str) -> None:
        self.verdict, self.reason, self.run = verdict, reason, None

    def told(self) -> dict[str, Any]:
        return {
            "plan": self.plan.name,
            "verdict": self.verdict,
            "ms": self.timing.ms if self.timing else None,
            "spread": self.timing.spread if self.timing else None,
            "error": self.error if self.error is not None and math.isfinite(self.error) else None,
            "reason": self.reason,
        }


def autotune(fn: Callable[..., Any], *args: Any, quiet: bool = False, **kwargs: Any) -> AutotuneResult:
    """Times every plan of every operation of this package in `fn` on this device, and keeps the fastest of each.

    Later traces, in this and in other processes, run the plan that was kept ahead of the ranking, unless the caller
    names an `implementation`; `explain` says so. A plan that is wrong is never chosen, and equally fast ones keep the
    ranked order. A record is heeded while cuDNN, this package and the DSLs are those that it was measured with. An
    operation that names its `implementation` in `fn` is timed, and no record is made of it; nor where there is one plan
    only.

    Args:
      fn: a function, jitted or not. Give `jax.grad` of a function for its backward operations.
      *args: arrays or `jax.ShapeDtypeStruct`s to trace it on. Operands that an array settles (it arrives unchanged, or
        they are integers that follow from it) have its values when they are timed; others are random, lengths full.
      quiet: show no progress on standard error.
      **kwargs: keywords of `fn`, as `explain` takes them.

    Raises:
      ValueError: `aot.target` names a GPU that need not be here.
      GraphNotSupportedError: nothing serves an operation; the message holds every engine's reason.
    """
    if _target.ahead_of_time.value is not None:
        raise ValueError("autotune inside aot.target; the rule: it times plans on a device that is here")
    target = _target.current()
    found = _distinct(sites(fn, *args, **kwargs))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        tunings = [_Tuning(site, target, progress) for site in found]
        rows = tuple(tuning.run() for tuning in tunings)
    if any(row["recorded"] for row in rows):
        jax.clear_caches()  # of functions that were lowered with another plan
    return AutotuneResult(target.describe(), rows)


def _distinct(found: Iterable[Site]) -> list[Site]:
    """Operations that are one graph are one."""
    merged: dict[tuple[str, str | None], Site] = {}
    for site in found:
        key = (site.graph().hash(), site.config.implementation)
        merged[key] = replace(merged[key], count=merged[key].count + site.count) if key in merged else site
    return list(merged.values())


class _Tuning:
    """One operation's plans, built, checked and timed."""

    def __init__(self, site: Site, target: Target, progress: Progress) -> None:
        self.site = site
        self.target = target
        self.built = site.built()
        self.built.graph.freeze()
        self.planner = Planner(self.built.graph, Request(target, planning.DEFAULT_MODES, site.config.implementation))
        self.results = site.operation.results(site.config, site.operands)
        self.trials = [_Trial(plan, partial(self._built, at)) for at, plan in enumerate(self.planner.plans)]
        self.notes: list[str] = []
        self._progress = progress
        steps = len(self.trials) + EFFORT.rounds
        self._task = progress.add_task(f"{site.operation.name} {self.planner.subject}", total=steps)

    def run(self) -> dict[str, Any]:
        self.planner.first()  # raises where nothing serves
        arrays, missing = _arrays(self.site)
        against = chosen = None
        if missing:
            self.notes.append(f"not timed: give autotune arrays that settle {', '.join(missing)}")
        else:
            against, want = self._expected(arrays)
            for trial in self._tracked(self.trials):
                self._compile(trial, arrays)
                self._check(trial, arrays, want, against)
            self._time(arrays)
            chosen = _fastest(self.trials)
        ranked = next((trial for trial in self.trials if trial.verdict != "declined"), None)
        recorded = self._record(chosen)
        names = {trial.plan.name for trial in self.trials}
        return {
            "operation": self.site.operation.name,
            "count": self.site.count,
            "facts": self.planner.subject,
            "family": self.planner.family.name if self.planner.family else None,
            "ranked": ranked.plan.name if ranked else None,
            "chosen": chosen.plan.name if chosen else None,
            "recorded": recorded,
            "against": against.name if against else None,
            "plans": [trial.told() for trial in self.trials],
            "declines": [[each.engine, each.reason] for each in self.planner.declines if each.engine not in names],
            "notes": self.notes,
        }

    def _built(self, position: int) -> Artifact:
        return self.planner.build(position)[1]

    def _expected(self, arrays: Sequence[jax.Array]) -> tuple[PlanConfig | None, Sequence[jax.Array]]:
        """Results to compare with, and whose they are: the reference engine's, or else the first plan's that runs."""
        for trial in (*self._reference(), *self.trials):
            self._compile(trial, arrays)
            if trial.run is not None and (results := self._results(trial, arrays)) is not None:
                return trial.plan, results
        return None, ()

    def _reference(self) -> list[_Trial]:
        try:
            planned = planning.plan(self.built.graph, self.target, "xla")
        except GraphNotSupportedError:
            self.notes.append("the reference engine declines")
            return []
        listed = [trial for trial in self.trials if trial.plan == planned.plan]
        return listed or [_Trial(planned.plan, lambda: planned.artifact)]

    def _compile(self, trial: _Trial, arrays: Sequence[jax.Array]) -> None:
        if trial.run is not None or trial.reason is not None:
            return
        fn = partial(with_artifact, self.site.operation, self.site.config, tuple(self.site.operands))
        try:
            trial.run = jax.jit(fn(trial.build())).lower(*arrays).compile()
        except DECLINES as error:
            trial.give_up("declined", one_line(error))
        except jax.errors.JaxRuntimeError as error:
            trial.give_up("failed", one_line(error))

    def _check(
        self, trial: _Trial, arrays: Sequence[jax.Array], want: Sequence[jax.Array], against: PlanConfig | None
    ) -> None:
        """Gives up a plan whose results are others."""
        if trial.run is None or against is None or (got := self._results(trial, arrays)) is None:
            return
        pairs = zip(self.results, got, want, strict=True)
        errors = {name: relative_error(mine, right) for name, mine, right in pairs}
        worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
        trial.error = errors[worst]
        if not errors[worst] <= self._tolerance():
            trial.give_up("wrong", f"{worst} differs from {against.name}'s by {errors[worst]:.2g}")

    def _results(self, trial: _Trial, arrays: Sequence[jax.Array]) -> Sequence[jax.Array] | None:
        """What a plan makes, on memory that was poisoned; None where it cannot run."""
        assert trial.run is not None
        try:
            poison(list(self.results.values()))
            return jax.block_until_ready(trial.run(*arrays))
        except jax.errors.JaxRuntimeError as error:
            trial.give_up("failed", one_line(error))
            return None

    def _tolerance(self) -> float:
        floats = [x.dtype for x in self.site.operands.values() if jnp.issubdtype(x.dtype, jnp.inexact)]
        return max((TOLERANCE.get(dtype.name, COARSE) for dtype in floats), default=0.0)

    def _time(self, arrays: Sequence[jax.Array]) -> None:
        right = {trial.plan.name: trial for trial in self.trials if trial.run is not None}
        orders = self._tracked(rotated(list(right), EFFORT.rounds))
        timings = interleave({name: trial.run for name, trial in right.items()}, arrays, EFFORT, orders)
        for name, timing in timings.items():
            right[name].timing, right[name].verdict = timing, "timed"

    def _record(self, chosen: _Trial | None) -> bool:
        if chosen is None or chosen.timing is None:
            return False
        if self.site.config.implementation is not None:
            self.notes.append(f"implementation={self.site.config.implementation!r} is asked for")
            return False
        if len(self.trials) == 1:
            self.notes.append("there is one plan only")
            return False
        if self.built.graph.in_place:
            self.notes.append("every call was timed with a copy of what it writes over: too much to tell plans apart")
            return False
        record = records.Record(chosen.plan, chosen.timing.ms)
        if reason := records.keep(self.built.graph, self.target, record):
            self.notes.append(f"in this process alone: {reason}")
        return True

    def _tracked(self, steps: Iterable[Any]) -> Iterable[Any]:
        for step in steps:
            yield step
            self._progress.advance(self._task)


def _fastest(trials: Sequence[_Trial]) -> _Trial | None:
    """The first in ranked order that is as fast as any, by ratios within a round and their spread."""
    timed = [(trial, trial.timing) for trial in trials if trial.timing is not None]
    if not timed:
        return None
    _, best = min(timed, key=lambda each: each[1].ms)
    for trial, timing in timed:
        ratio, spread = timing.ratio_to(best)
        if 1 - ratio <= max(spread, NOISE):
            return trial
    raise AssertionError("the fastest is as fast as itself")


# Data


def _arrays(site: Site) -> tuple[list[jax.Array], list[str]]:
    """Operands to time with, and the names of those for which no values are known."""
    rng = np.random.default_rng(0)
    device = jax.local_devices()[0]
    with jax.default_device(device):
        known = {name: jax.device_put(value(), device) for name, value in site.known.items()}
        drawn = {name: _drawn(rng, aval) for name, aval in site.operands.items() if name not in known}
        arrays = {name: jnp.asarray(array) for name, array in drawn.items() if array is not None} | known
        if site.operation.sample is not None:
            arrays |= {**site.operation.sample(site.config, site.operands, arrays), **known}
    missing = [name for name in site.operands if name not in arrays]
    return [arrays[name] for name in site.operands if name in arrays], missing


def _drawn(rng: np.random.Generator, aval: jax.ShapeDtypeStruct) -> np.ndarray | None:
    """Random numbers of a kind that has no meaning of its own; integers have one."""
    if aval.dtype == jnp.bool_:
        return rng.random(aval.shape, np.float32) < 0.5
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return rng.standard_normal(aval.shape, np.float32).astype(aval.dtype)
    return None
