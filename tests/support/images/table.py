"""The table of what the images take, kept beside the engines, and what a build may not do to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from support.images.build import Built, Job

PATH = Path(__file__).parents[3] / "engines" / "images.json"
FIELDS = ("registers", "local", "shared", "threads")
_LOCAL = FIELDS.index("local")
UPDATE = "run make check UPDATE=1"


def read() -> dict[str, Any]:
    """The table: `images` by job, plan and kernel, and `exceptions`, which say why an image may use local memory."""
    empty = {"fields": list(FIELDS), "compilers": {}, "exceptions": {}, "images": {}}
    return json.loads(PATH.read_text()) if PATH.is_file() else empty


def entry(built: Built) -> dict[str, Any]:
    return {"key": built.key, "plans": {name: dict(sorted(kernels.items())) for name, kernels in built.plans}}


def problems(table: Mapping[str, Any], found: Mapping[Job, Built], every: bool) -> list[str]:
    """What is wrong, one line each. With `every`, `found` is all that there is and the table holds nothing else."""
    lines = []
    for job, built in found.items():
        lines += _changes(job.name, table["images"].get(job.name, {"plans": {}})["plans"], entry(built)["plans"])
        lines += _spills(job.name, table["exceptions"], built)
    if every:
        gone = set(table["images"]) - {job.name for job in found}
        lines += [f"{name}: is in the table and no sample; {UPDATE}" for name in sorted(gone)]
    return lines


def _changes(job: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    lines = []
    for plan in dict.fromkeys([*old, *new]):
        before, after = old.get(plan, {}), new.get(plan, {})
        for kernel in dict.fromkeys([*before, *after]):
            was, now = before.get(kernel), after.get(kernel)
            if was is None or now is None:
                state = "is not in the table" if was is None else "is in the table and was not built"
                lines.append(f"{job}: {plan}: {kernel} {state}; {UPDATE}")
            elif was != now:
                moved = [f"{name} {a} -> {b}" for name, a, b in zip(FIELDS, was, now, strict=True) if a != b]
                lines.append(f"{job}: {plan}: {kernel}: {', '.join(moved)}; {UPDATE}")
    if not lines and list(old) != list(new):
        lines.append(f"{job}: plans are ranked {', '.join(new)}, the table has {', '.join(old)}; {UPDATE}")
    return lines


def _spills(job: str, exceptions: Mapping[str, str], built: Built) -> list[str]:
    """Local memory in the plan that is ranked first, unless the table says why with a measurement."""
    lines = []
    for plan, kernels in built.plans[:1]:
        for kernel, numbers in kernels.items():
            if numbers[_LOCAL] and not exceptions.get(f"{job}, {kernel}"):
                rule = f'the rule: 0 in the plan ranked first, or a measurement in exceptions["{job}, {kernel}"]'
                lines.append(f"{job}: {plan}: {kernel}: {numbers[_LOCAL]} bytes of local memory; {rule}")
    return lines


def updated(
    table: Mapping[str, Any], found: Mapping[Job, Built], every: Iterable[Job], compilers: Mapping[str, str]
) -> dict[str, Any]:
    """The table with what was found of `every` job. Those that were not built stay, and so do exceptions, which are
    written by hand."""
    known = table["images"]
    images = {job.name: known[job.name] for job in every if job.name in known}
    images |= {job.name: entry(built) for job, built in found.items()}
    return {**table, "fields": list(FIELDS), "compilers": dict(compilers), "images": dict(sorted(images.items()))}


def write(table: Mapping[str, Any]) -> None:
    PATH.write_text(_text(table, 0) + "\n")


def _text(value: Any, depth: int) -> str:
    """JSON with one kernel a line."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    inner = ",\n".join(
        f"{' ' * (depth + 1)}{json.dumps(name)}: {_text(each, depth + 1)}" for name, each in value.items()
    )
    return f"{{\n{inner}\n{' ' * depth}}}"
