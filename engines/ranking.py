"""The order of a plan list that every family starts from, and what was measured of it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cudnn_jax.engines import placement
from cudnn_jax.engines.base import PlanConfig
from cudnn_jax.engines.target import Target

_OURS = frozenset({"A", "B", "OPENSOURCE"})
"""Modes that ask for our kernels, which have one order among themselves. "OPENSOURCE" asks for nothing else."""


def recommend(
    modes: Sequence[str],
    facts: Any,
    offered: Sequence[PlanConfig],
    backend_plans: Sequence[PlanConfig],
    target: Target,
) -> list[PlanConfig]:
    """The plan list, best first: mode by mode our kernels and then cuDNN's plans, and behind all modes the reference.

    Each entry carries the mode that asks for it first; the reference, which serves in any, the last.
    """
    ours = [plan for plan in offered if plan.engine != "xla"]
    ranked: list[PlanConfig] = []
    for mode in modes:
        ranked += [replace(plan, mode=mode) for plan in ours if mode in _OURS]
        ranked += [plan for plan in backend_plans if plan.mode == mode]
    last = modes[-1] if modes else None
    return [*ranked, *(replace(plan, mode=last) for plan in offered if plan.engine == "xla")]


def measured(room: str) -> Callable[..., list[PlanConfig]]:
    """`recommend` with the engines of a family's room in their measured order, where a graph is in a measured cell."""

    def arranged(
        modes: Sequence[str],
        facts: Any,
        offered: Sequence[PlanConfig],
        backend_plans: Sequence[PlanConfig],
        target: Target,
    ) -> list[PlanConfig]:
        return placement.arrange(room, facts, recommend(modes, facts, offered, backend_plans, target))

    return arranged
