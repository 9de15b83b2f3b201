"""The order of a plan list that every family starts from; a family's `heuristics` says why it is right there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn_jax.engines.base import PlanConfig
from cudnn_jax.engines.target import Target


def recommend(
    modes: Sequence[str],
    facts: Any,
    offered: Sequence[PlanConfig],
    backend_plans: Sequence[PlanConfig],
    target: Target,
) -> list[PlanConfig]:
    """The plan list, best first: our kernels, cuDNN's plans in the order of `modes`, the reference."""
    ours = [plan for plan in offered if plan.engine != "xla"]
    backend = sorted(backend_plans, key=lambda plan: modes.index(plan.mode or "A"))
    reference = [plan for plan in offered if plan.engine == "xla"]
    return [*ours, *backend, *reference]
