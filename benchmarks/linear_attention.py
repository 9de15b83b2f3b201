"""What the benchmarks of linear attention share."""

from __future__ import annotations

from cudnn_jax.engines import placement
from cudnn_jax.engines.base import PlanConfig
from cudnn_jax.engines.linear_attention import gdn_recurrent_cutile
from cudnn_jax.engines.linear_attention.facts import LinearFacts, analyze
from cudnn_jax.engines.linear_attention.gdn_cutile import CutileGdn
from cudnn_jax.engines.linear_attention.gdn_launch import Knobs
from cudnn_jax.engines.linear_attention.kda_cutile import CutileGdn2, CutileKda
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import Target

CHUNKED = {"gdn": CutileGdn, "kda": CutileKda, "gdn2": CutileGdn2}
"""Operation -> its engine that works chunk by chunk."""


def settings(facts: LinearFacts, target: Target) -> dict[str, list[Knobs]]:
    """Every setting of our engines by engine, also on a machine that cannot compile them."""
    chunked = CHUNKED[facts.operation]
    found = {chunked.name: chunked.programs[facts.direction].settings(facts, target)}
    if facts.direction == "fwd":
        found[recurrent(facts.operation)] = gdn_recurrent_cutile.settings(facts)
    return found


def recurrent(operation: str) -> str:
    """The name of an operation's engine that works token by token."""
    return f"cutile_{operation}_recurrent"


def plans(graph: pygraph, target: Target) -> list[str]:
    """The names of our plans, the first ranked in front, also on a machine that cannot compile them."""
    graph.freeze()
    facts = analyze(graph)
    listed = [
        PlanConfig(0, knobs, engine=engine) for engine, found in settings(facts, target).items() for knobs in found
    ]
    return [plan.name for plan in placement.arrange("linear_attention", facts, listed)]
