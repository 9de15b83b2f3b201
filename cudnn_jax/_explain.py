"""`cudnn_jax.explain`: which engine runs each operation of a function, and why the others do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from cudnn_jax import _target
from cudnn_jax.ops import _primitive


@dataclass(frozen=True)
class Explanation:
    """What runs: one row for each distinct operation, in the order of the traced function.

    Each row is a dict with `operation`, `count`, `facts`, `family`, `engine`, `plan`, `workspace` (bytes), `artifact`
    ("program" or "inline"), `plans` (the ranked list by name), `declines` ([engine, reason] pairs) and `notes` (copies
    that could not be avoided).
    """

    target: str
    rows: tuple[Mapping[str, Any], ...]

    def to_json(self) -> str:
        return json.dumps({"target": self.target, "rows": list(self.rows)}, indent=1)

    def engines(self) -> dict[str, str]:
        """operation -> the engines that run it, comma-separated."""
        found: dict[str, list[str]] = {}
        for row in self.rows:
            names = found.setdefault(row["operation"], [])
            if row["engine"] not in names:
                names.append(row["engine"])
        return {operation: ", ".join(names) for operation, names in found.items()}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=f"operations on {self.target}", title_justify="left")
        for heading in ("operation", "facts", "runs", "workspace", "ranked behind or declined"):
            table.add_column(heading, overflow="fold")
        for row in self.rows:
            behind = [name for name in row["plans"] if name != row["plan"]]
            others = behind[:4] + ([f"and {len(behind) - 4} more"] if len(behind) > 4 else [])
            others += [f"{engine}: {reason}" for engine, reason in row["declines"]] + list(row["notes"])
            table.add_row(
                row["operation"] + (f" x{row['count']}" if row["count"] > 1 else ""),
                row["facts"],
                row["plan"],
                f"{row['workspace']:,} B",
                "\n".join(others),
            )
        yield table

    def __str__(self) -> str:
        console = Console(width=160, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Traces `fn` on `args` (arrays or `jax.ShapeDtypeStruct`s) and plans every operation of this package in it.

    Nothing runs. The target is that of `aot.target` or else JAX's default device.
    """
    traced = fn.trace(*args, **kwargs).jaxpr if hasattr(fn, "trace") else jax.make_jaxpr(fn)(*args, **kwargs)
    target = _target.current()
    by_name = {f"cudnn_jax.{name}": operation for name, operation in _primitive.OPERATIONS.items()}
    counts: dict[tuple[Any, ...], int] = {}
    for eqn in _equations(traced.jaxpr):
        if eqn.primitive.name in by_name:
            avals = tuple((var.aval.shape, var.aval.dtype) for var in eqn.invars)
            params = eqn.params
            site = (eqn.primitive.name, params["names"], avals, params["config"], params["notes"])
            counts[site] = counts.get(site, 0) + 1
    rows = []
    for (name, names, avals, config, notes), count in counts.items():
        operands = {key: jax.ShapeDtypeStruct(*aval) for key, aval in zip(names, avals, strict=True)}
        planned = _primitive.plan_for(by_name[name], config, operands, target)
        rows.append(
            {
                "operation": name.removeprefix("cudnn_jax."),
                "count": count,
                "facts": planned.subject,
                "family": planned.family,
                "engine": planned.plan.engine,
                "plan": planned.plan.name,
                "workspace": planned.plan.workspace,
                "artifact": type(planned.artifact).__name__.lower(),
                "plans": [plan.name for plan in planned.plans],
                "declines": [[decline.engine, decline.reason] for decline in planned.declines],
                "notes": [*notes, *getattr(planned.artifact, "notes", ())],
            }
        )
    return Explanation(target.describe(), tuple(rows))


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _equations(inner)
