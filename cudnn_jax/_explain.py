"""`cudnn_jax.explain`: which engine runs each operation of a function, and why the others do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from cudnn_jax import _target
from cudnn_jax._printed import Printed
from cudnn_jax._sites import sites
from cudnn_jax.engines import backend
from cudnn_jax.engines.versions import versions


@dataclass(frozen=True)
class Explanation(Printed):
    """What runs: one row for each distinct operation, in the order of the traced function.

    Each row is a dict with `operation`, `count`, `facts`, `family`, `engine`, `plan`, `workspace` (bytes), `artifact`
    ("program" or "inline"), `plans` (the ranked list by name), `declines` ([engine, reason] pairs) and `notes` (copies
    that could not be avoided) and `origin` ("planned here", "autotune record" with its time, or the folder and the
    release that the plan comes from). `missing` says in one line each which library could not be opened, so that cuDNN
    was not asked for plans.
    """

    target: str
    rows: tuple[Mapping[str, Any], ...]
    missing: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps({"target": self.target, "missing": self.missing, "rows": list(self.rows)}, indent=1)

    def engines(self) -> dict[str, str]:
        """operation -> the engines that run it, comma-separated."""
        found: dict[str, list[str]] = {}
        for row in self.rows:
            names = found.setdefault(row["operation"], [])
            if row["engine"] not in names:
                names.append(row["engine"])
        return {operation: ", ".join(names) for operation, names in found.items()}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.missing:
            yield Text(f"cuDNN was not asked: {', '.join(self.missing)}; `python -m cudnn_jax doctor` says more")
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
                row["plan"] + (f"\n({row['origin']})" if row["origin"].startswith("autotune") else ""),
                f"{row['workspace']:,} B",
                "\n".join(others),
            )
        yield table


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Traces `fn` on `args` (arrays or `jax.ShapeDtypeStruct`s) and plans every operation of this package in it.

    Nothing runs. The target is that of `aot.target` or else JAX's default device. Where XLA partitions `fn` over a
    mesh, `fn` is compiled to learn how each operation is split, and rows are the share of one device.
    """
    target = _target.current()
    rows = []
    for site in sites(fn, *args, **kwargs):
        planned = site.plan(target)
        rows.append(
            {
                "operation": site.operation.name,
                "count": site.count,
                "facts": planned.subject,
                "family": planned.family,
                "engine": planned.plan.engine,
                "plan": planned.plan.name,
                "workspace": planned.plan.workspace,
                "artifact": type(planned.artifact).__name__.lower(),
                "plans": [plan.name for plan in planned.plans],
                "declines": [[decline.engine, decline.reason] for decline in planned.declines],
                "origin": planned.origin,
                "notes": [*site.notes, *getattr(planned.artifact, "notes", ())],
            }
        )
    return Explanation(target.describe(), tuple(rows), _missing(rows))


def _missing(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The libraries that asking cuDNN takes and that are not here, where it would have been asked."""
    reasons = {reason for row in rows for engine, reason in row["declines"] if engine == backend.NAME}
    if not any(reason.startswith("lib") for reason in reasons):  # opens nothing where cuDNN had its say
        return ()
    found = versions().missing
    absent = [found[library] for library in ("cuda_driver", "cudnn") if library in found]
    return tuple(reason.partition(",")[0] for reason in absent) if reasons.intersection(absent) else ()
