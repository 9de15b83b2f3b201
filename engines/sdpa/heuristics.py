"""The one ranked plan list of attention graphs.

cuDNN leads wherever it has a plan; the reference engine follows. Which of cuDNN's own plans leads is read from
`placement.json`, whose rows name the measurement they came from; a cell without a row keeps cuDNN's order.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

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
    backend = sorted(backend_plans, key=lambda plan: (modes.index(plan.mode or "A"), _placement(plan, facts, target)))
    ours = [plan for plan in offered if plan.engine != "xla"]
    reference = [plan for plan in offered if plan.engine == "xla"]
    return [*ours, *backend, *reference]


def _placement(plan: PlanConfig, facts: SdpaFacts, target: Target) -> int:
    """Position of a backend plan inside its mode; `sorted` is stable, so unmeasured cells keep cuDNN's order."""
    for rule in _rules():
        if _matches(rule["cell"], facts, target):
            names: list[str] = rule["order"]
            return names.index(plan.name) if plan.name in names else len(names)
    return 0


def _matches(cell: dict[str, Any], facts: SdpaFacts, target: Target) -> bool:
    if cell["device_kind"] != target.device_kind or cell["direction"] != facts.direction:
        return False
    if cell.get("causal") is not None and cell["causal"] != (facts.right == 0):
        return False
    for name, (low, high) in cell.get("ranges", {}).items():
        if not low <= getattr(facts, name) <= high:
            return False
    return True


@cache
def _rules() -> list[dict[str, Any]]:
    text = (importlib.resources.files("cudnn_jax.engines.sdpa") / "placement.json").read_text()
    rules: list[dict[str, Any]] = json.loads(text)["rules"]
    return rules
