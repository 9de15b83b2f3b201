"""Which engine leads where: what was measured, cell by cell, beside the engines that it orders.

`placement.json` in a family's room holds cells: the facts that a graph must have to be in one (a value, or a range
[from, to) of numbers), the order of engines there, the times that it comes from and the file that holds them. A graph
in no cell keeps the order that the list came in. `python -m benchmarks placement` makes the file from benchmarks'
results.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from cudnn_jax.engines.base import PlanConfig


def arrange(room: str, facts: Any, plans: Sequence[PlanConfig]) -> list[PlanConfig]:
    """The plans with measured engines in their measured order, in the places that these had; each engine's own order
    stays."""
    order = order_of(room, facts)
    places = [at for at, plan in enumerate(plans) if plan.engine in order]
    moved = sorted((plans[at] for at in places), key=lambda plan: order.index(plan.engine))
    arranged = list(plans)
    for at, plan in zip(places, moved, strict=True):
        arranged[at] = plan
    return arranged


def order_of(room: str, facts: Any) -> tuple[str, ...]:
    """The engines of the first cell that the facts are in, the fastest first; empty where there is none."""
    for cell in cells(room):
        if all(_holds(wanted, getattr(facts, name)) for name, wanted in cell["where"].items()):
            return tuple(cell["order"])
    return ()


@functools.cache
def cells(room: str) -> list[Mapping[str, Any]]:
    """The cells of a room, none where nothing was measured."""
    file = resources.files("cudnn_jax.engines").joinpath(room, "placement.json")
    if not file.is_file():
        return []
    found: list[Mapping[str, Any]] = json.loads(file.read_text())["cells"]
    return found


def _holds(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, list):
        low, high = wanted
        return bool(low <= value and (high is None or value < high))
    return bool(wanted == value)
