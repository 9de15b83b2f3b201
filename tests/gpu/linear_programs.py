"""Plans of linear attention graphs for an H200, named without a DSL: a machine that has none can ask for programs that
were built elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from benchmarks.linear_attention import settings
from cudnn_jax.engines.base import PlanConfig
from cudnn_jax.engines.linear_attention.facts import analyze
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import named
from support.gdn_cases import Case

TARGET = named("h200")
HEADS = ((1, 1, 1), (2, 2, 2), (2, 1, 4), (4, 2, 2))
KINDS = ("mild", "strong", "reset", "correlated", "unwritten", "zero_keys")
"""Inputs of GDN's drawn cases."""


def drawn_types(rng: np.random.Generator, dtype: str) -> dict[str, str]:
    """Of a case whose io type is known: its kind of inputs, and the types of its gates, states and offsets."""
    return {
        "kind": str(rng.choice(KINDS)),
        "dtype": dtype,
        "gates": str(rng.choice(["float32", dtype])),
        "state": str(rng.choice(["float32", "bfloat16"])),
        "cu": str(rng.choice(["int32", "int64"])),
    }


def graph_of(case: Case) -> pygraph:
    return case.graph(case.draw(np.random.default_rng(0)))


def implementations(case: Case, engine: str) -> list[str]:
    """The names of an engine's plans for a case, the predicted best first."""
    graph = graph_of(case)
    graph.freeze()
    return [PlanConfig(0, knobs, engine=engine).name for knobs in settings(analyze(graph), TARGET)[engine]]


def in_turn(case: Case, engine: str, number: int) -> str:
    """The plan that a drawn case is tested with: an engine's settings take turns."""
    names = implementations(case, engine)
    return names[number % len(names)]


def one_each(cases: Iterable[Case], engine: str) -> Iterator[tuple[pygraph, str]]:
    """Graphs as `gpu.ahead` builds them, each with one plan."""
    for number, case in enumerate(cases):
        yield graph_of(case), in_turn(case, engine, number)


def all_of(cases: Iterable[Case], engine: str) -> Iterator[tuple[pygraph, str]]:
    """Graphs as `gpu.ahead` builds them, each with every plan of an engine."""
    for case in cases:
        for name in implementations(case, engine):
            yield graph_of(case), name
