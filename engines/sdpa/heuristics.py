"""The one ranked plan list of attention graphs.

cuDNN leads wherever it has a plan, in cuDNN's own order within a mode, and the reference engine follows. On an H200
with cuDNN 9.19 the first plan of mode A was the fastest, or tied with it, in every case of benchmarks/sdpa.py; the
figures are under benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_jax.engines.base import PlanConfig
from cudnn_jax.engines.sdpa.facts import SdpaFacts
from cudnn_jax.engines.target import Target


def recommend(
    modes: Sequence[str],
    facts: SdpaFacts,
    offered: Sequence[PlanConfig],
    backend_plans: Sequence[PlanConfig],
    target: Target,
) -> list[PlanConfig]:
    """Returns the plan list, best first."""
    ours = [plan for plan in offered if plan.engine != "xla"]
    backend = sorted(backend_plans, key=lambda plan: modes.index(plan.mode or "A"))
    reference = [plan for plan in offered if plan.engine == "xla"]
    return [*ours, *backend, *reference]
