"""The one ranked plan list of norm graphs.

The cuTile engine leads: on an H200 its first setting was faster than jitted jax.numpy and than the reference in every
case of `python -m benchmarks norm`. cuDNN's plans follow, the reference is last.
"""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_jax.engines.base import PlanConfig
from cudnn_jax.engines.norm.facts import NormFacts
from cudnn_jax.engines.target import Target


def recommend(
    modes: Sequence[str],
    facts: NormFacts,
    offered: Sequence[PlanConfig],
    backend_plans: Sequence[PlanConfig],
    target: Target,
) -> list[PlanConfig]:
    """Returns the plan list, best first."""
    ours = [plan for plan in offered if plan.engine != "xla"]
    backend = sorted(backend_plans, key=lambda plan: modes.index(plan.mode or "A"))
    reference = [plan for plan in offered if plan.engine == "xla"]
    return [*ours, *backend, *reference]
