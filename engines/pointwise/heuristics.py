"""The one ranked plan list of pointwise graphs: a fused kernel where one fits, cuDNN's plans, the reference engine."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_jax.engines.base import PlanConfig
from cudnn_jax.engines.pointwise.facts import PointwiseFacts
from cudnn_jax.engines.target import Target


def recommend(
    modes: Sequence[str],
    facts: PointwiseFacts,
    offered: Sequence[PlanConfig],
    backend_plans: Sequence[PlanConfig],
    target: Target,
) -> list[PlanConfig]:
    """Returns the plan list, best first."""
    ours = [plan for plan in offered if plan.engine != "xla"]
    backend = sorted(backend_plans, key=lambda plan: modes.index(plan.mode or "A"))
    reference = [plan for plan in offered if plan.engine == "xla"]
    return [*ours, *backend, *reference]
