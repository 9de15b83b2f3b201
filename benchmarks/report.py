"""Rows, the JSON file and the table that every benchmark ends with."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import cudnn_jax
from benchmarks.harness import Ceilings, Timing

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "cudnn-jax",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu13",
    "flash-attn3-jax",
    "fla-core",
    "torch",
    "triton",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One plan in one case beside one peer; `ratio` = peer_ms / ms, above 1 where the plan is faster.

    `chosen` marks the plan that a call without `implementation` runs. `spread` and `ratio_spread` are half the
    interquartile range over the rounds.
    """

    op: str
    case: str
    direction: str
    plan: str
    clock: str
    ms: float
    spread: float
    roofline_ms: float | None = None
    peer: str | None = None
    peer_ms: float | None = None
    ratio: float | None = None
    ratio_spread: float | None = None
    chosen: bool = False
    error: dict[str, float] | None = None


@dataclasses.dataclass
class Report:
    """What a benchmark found. `left_out` holds what was not timed, and why; `wrong` holds plans that failed a check."""

    op: str
    seed: int
    ceilings: Ceilings
    rows: list[Row] = dataclasses.field(default_factory=list)
    left_out: list[dict[str, str]] = dataclasses.field(default_factory=list)
    wrong: list[dict[str, str]] = dataclasses.field(default_factory=list)
    memory: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """Case -> plan or peer -> the most bytes that it holds beyond what it is given."""
    peer_errors: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """Case, direction and peer -> the relative errors of the peer's results, where these are of interest."""

    def add(self, timing: Timing, peers: dict[str, Timing], **common: Any) -> None:
        """One row beside each peer, or one without where no peer ran."""
        for name, peer in (peers or {None: None}).items():
            beside: dict[str, Any] = {}
            if peer is not None:
                ratio, spread = timing.ratio_to(peer)
                beside = {"peer": name, "peer_ms": peer.ms, "ratio": ratio, "ratio_spread": spread}
            self.rows.append(Row(op=self.op, ms=timing.ms, spread=timing.spread, **beside, **common))

    def as_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "ceilings": dataclasses.asdict(self.ceilings),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "left_out": self.left_out,
            "wrong": self.wrong,
            **{name: found for name in ("memory", "peer_errors") if (found := getattr(self, name))},
        }

    def write(self, folder: Path | None) -> Path:
        """Writes `<op>-<date>.json` under `folder`, by default the results folder of this device."""
        return write_json(self.op, self.as_dict(), folder)

    def show(self, console: Console) -> None:
        console.print(table(self.rows, f"{self.op} on {jax.devices()[0].device_kind}"))
        console.print(
            f"ceilings of this run: copy {self.ceilings.copy_gb_s:,.0f} GB/s, "
            f"bfloat16 product {self.ceilings.matmul_tflop_s:,.1f} TFLOP/s"
        )
        for peer in dict.fromkeys(row.peer for row in self.rows if row.peer):
            console.print(self._verdict(peer), highlight=False)
        for heading, entries in (("left out", self.left_out), ("WRONG", self.wrong)):
            for (name, reason), where in _grouped(entries).items():
                line = f"{heading}: {name}: {reason} ({where})"
                console.print(line, highlight=False, markup=False, style="red" if entries is self.wrong else None)

    def _verdict(self, peer: str) -> str:
        """How the plans that run by default stand against one peer; within the spread counts as a tie."""
        rows = [row for row in self.rows if row.chosen and row.peer == peer and row.ratio is not None]
        if not rows:
            return f"against {peer}: no plan that runs by default was timed"
        worst = min(rows, key=lambda row: row.ratio or 0.0)
        slower = sum((row.ratio or 0.0) + (row.ratio_spread or 0.0) < 1.0 for row in rows)
        return (
            f"default plans against {peer}: slower in {slower} of {len(rows)}, lowest ratio {worst.ratio:.3f} "
            f"±{worst.ratio_spread:.3f} ({worst.case}, {worst.direction})"
        )


def write_json(name: str, content: dict[str, Any], folder: Path | None) -> Path:
    """Writes `content` as `<name>-<date>.json`, with the device and the versions that it was found with."""
    device, date = jax.devices()[0].device_kind, datetime.date.today().isoformat()
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    path = (folder or RESULTS / slug) / f"{name}-{date}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"device": device, "date": date, "versions": versions(), **content}
    path.write_text(json.dumps(rounded(whole), indent=1) + "\n")
    return path


def _grouped(entries: Iterable[dict[str, str]]) -> dict[tuple[str, str], str]:
    """One entry for each name and reason, with the place or the number of places where it holds."""
    places: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        places.setdefault((entry["name"], entry["reason"]), []).append(f"{entry['case']}, {entry['direction']}")
    return {key: held[0] if len(held) == 1 else f"{len(held)} comparisons" for key, held in places.items()}


def table(rows: Iterable[Row], title: str) -> Table:
    made = Table(title=title, title_justify="left", caption="* the plan that runs by default", caption_justify="left")
    for heading in ("case", "direction", "plan"):
        made.add_column(heading, overflow="fold")
    for heading in ("clock", "ms", "spread", "roofline", "peer", "peer ms", "ratio"):
        made.add_column(heading, justify="left" if heading in ("clock", "peer") else "right", no_wrap=True)
    last = None
    for row in rows:
        section = (row.case, row.direction)
        if last is not None and section != last:
            made.add_section()
        made.add_row(
            row.case if section != last else "",
            row.direction if section != last else "",
            row.plan + (" *" if row.chosen else ""),
            row.clock,
            f"{row.ms:.4g}",
            f"{row.spread:.2g}",
            "" if row.roofline_ms is None else f"{row.roofline_ms / row.ms:.0%}",
            row.peer or "",
            "" if row.peer_ms is None else f"{row.peer_ms:.4g}",
            "" if row.ratio is None else f"{row.ratio:.3f} ±{row.ratio_spread:.3f}",
        )
        last = section
    return made


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    here = cudnn_jax.versions()
    told = {"cudnn": here.cudnn, "cuda driver": here.cuda_driver, "cutedsl": here.cutedsl}
    return found | {name: str(version) for name, version in told.items() if version is not None}


def rounded(value: Any) -> Any:
    """The same tree with floats at six significant digits; NaN becomes null, as JSON has none."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if value == value else None
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
