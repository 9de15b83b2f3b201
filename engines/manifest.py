"""Which engines exist: strings and integers, and no engine imports.

The manifest is the only way an engine exists. A graph belongs to one family or to none, by the node types that name a
family, and a graph with two such nodes belongs to none. Pointwise and reduction nodes stand beside any others and name
none; a graph of these alone is pointwise.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from cudnn_jax.engines import ids
from cudnn_jax.engines.base import BaseEngine
from cudnn_jax.graph import pygraph

BACKEND_UNPROVEN = "CUDNN_JAX_CUDNN_UNPROVEN"
"""Offers the backend's plans of the nodes in `backend_compared.NOT_COMPARED`."""

Reference = tuple[str, str]
"""("module", "callable"), resolved only when it is needed."""


@dataclass(frozen=True)
class EngineSlot:
    """One engine of a family. `opt_in` names an environment variable that must be "1" for it to be offered."""

    slot: int
    name: str
    factory: Reference
    opt_in: str | None = None

    def offered(self) -> bool:
        return self.opt_in is None or opted_in(self.opt_in)


@dataclass(frozen=True)
class EngineFamily:
    """A kind of graph: the node types that name it, its analyzer, its ranking, and its engines.

    `backend_limits` names a function (facts, target) -> reason or None: where the backend would accept a graph and
    give another answer than the operation's definition. `backend_prefill` names a function facts -> {output position:
    word}: what to write, as 4-byte words, over outputs that the backend may leave unwritten. `backend_graph` names a
    function (graph, facts) -> Derived or None: what to ask the backend in place of a graph that it has no plan for; it
    declines by raising one of `DECLINES`. Limits and prefill then judge the derived graph's facts.
    """

    name: str
    anchors: frozenset[str]
    analyzer: Reference
    heuristics: Reference | None
    slots: tuple[EngineSlot, ...]
    backend_limits: Reference | None = None
    backend_prefill: Reference | None = None
    backend_graph: Reference | None = None


def _attention(name: str, anchor: str) -> EngineFamily:
    """Forward and backward attention have their own blocks of ids, and share everything else."""
    room = "cudnn_jax.engines.sdpa"
    return EngineFamily(
        name=name,
        anchors=frozenset({anchor}),
        analyzer=(f"{room}.facts", "analyze"),
        heuristics=(f"{room}.heuristics", "recommend"),
        slots=(EngineSlot(ids.REFERENCE_SLOT, "xla", (f"{room}.engines", "SdpaReference")),),
        backend_limits=(f"{room}.backend_limits", "mismatch"),
        backend_prefill=(f"{room}.backend_limits", "prefill"),
        backend_graph=(f"{room}.backend_mask", "derive"),
    )


def _norm(name: str, anchor: str) -> EngineFamily:
    """Forward and backward norms, as attention."""
    room = "cudnn_jax.engines.norm"
    return EngineFamily(
        name=name,
        anchors=frozenset({anchor}),
        analyzer=(f"{room}.facts", "analyze"),
        heuristics=(f"{room}.heuristics", "recommend"),
        slots=(
            EngineSlot(0, "cutile_rmsnorm", (f"{room}.rmsnorm_cutile", "CutileRmsNorm")),
            EngineSlot(ids.REFERENCE_SLOT, "xla", (f"{room}.engines", "NormReference")),
        ),
    )


def opted_in(variable: str) -> bool:
    return os.environ.get(variable) == "1"


def opt_ins(family: EngineFamily | None) -> list[str]:
    """Which of the variables that offer more to the family's graphs are set: a part of every key that a plan has."""
    variables = {slot.opt_in for slot in (family.slots if family else ()) if slot.opt_in} | {BACKEND_UNPROVEN}
    return sorted(filter(opted_in, variables))


_LINEAR_ROOM = "cudnn_jax.engines.linear_attention"


def _linear_attention(name: str, *slots: EngineSlot) -> EngineFamily:
    """The forward and the backward of an operation share a block of ids."""
    return EngineFamily(
        name=name,
        anchors=frozenset({name.upper(), f"{name.upper()}_BWD"}),
        analyzer=(f"{_LINEAR_ROOM}.facts", "analyze"),
        heuristics=(f"{_LINEAR_ROOM}.heuristics", "recommend"),
        slots=(*slots, EngineSlot(ids.REFERENCE_SLOT, "xla", (f"{_LINEAR_ROOM}.engines", "LinearReference"))),
        backend_limits=(f"{_LINEAR_ROOM}.backend_limits", "mismatch"),
    )


_POINTWISE_ROOM = "cudnn_jax.engines.pointwise"

POINTWISE = EngineFamily(
    name="pointwise",
    anchors=frozenset(),
    analyzer=(f"{_POINTWISE_ROOM}.facts", "analyze"),
    heuristics=(f"{_POINTWISE_ROOM}.heuristics", "recommend"),
    slots=(
        EngineSlot(0, "cutedsl_bias_gelu", (f"{_POINTWISE_ROOM}.bias_gelu_cutedsl", "CutedslBiasGelu")),
        EngineSlot(ids.REFERENCE_SLOT, "xla", (f"{_POINTWISE_ROOM}.engines", "PointwiseReference")),
    ),
    backend_limits=(f"{_POINTWISE_ROOM}.backend_limits", "mismatch"),
)

GENERIC = EngineFamily(
    name="generic",
    anchors=frozenset(),
    analyzer=("cudnn_jax.engines.generic.facts", "analyze"),
    heuristics=("cudnn_jax.engines.ranking", "recommend"),
    slots=(EngineSlot(ids.REFERENCE_SLOT, "xla", ("cudnn_jax.engines.generic.engines", "GenericReference")),),
)
"""Stands behind the backend where a graph has no family, and behind a family whose own reference declines."""

FAMILIES: dict[str, EngineFamily] = {
    family.name: family
    for family in (
        _attention("sdpa_fwd", "SDPA"),
        _attention("sdpa_bwd", "SDPA_BACKWARD"),
        _norm("norm_fwd", "RMS_NORM"),
        _norm("norm_bwd", "RMS_NORM_BACKWARD"),
        _linear_attention(
            "gdn",
            EngineSlot(0, "cutile_gdn", (f"{_LINEAR_ROOM}.gdn_cutile", "CutileGdn")),
            EngineSlot(1, "cutile_gdn_recurrent", (f"{_LINEAR_ROOM}.gdn_recurrent_cutile", "CutileGdnRecurrent")),
        ),
        _linear_attention(
            "kda",
            EngineSlot(0, "cutile_kda", (f"{_LINEAR_ROOM}.kda_cutile", "CutileKda")),
            EngineSlot(1, "cutile_kda_recurrent", (f"{_LINEAR_ROOM}.gdn_recurrent_cutile", "CutileKdaRecurrent")),
        ),
        _linear_attention(
            "gdn2",
            EngineSlot(0, "cutile_gdn2", (f"{_LINEAR_ROOM}.kda_cutile", "CutileGdn2")),
            EngineSlot(1, "cutile_gdn2_recurrent", (f"{_LINEAR_ROOM}.gdn_recurrent_cutile", "CutileGdn2Recurrent")),
        ),
        POINTWISE,
        GENERIC,
    )
}

ANONYMOUS = frozenset({"POINTWISE", "REDUCTION"})
"""Node types that name no family."""


def resolve(reference: Reference) -> Callable[..., Any]:
    module, name = reference
    return cast(Callable[..., Any], getattr(importlib.import_module(module), name))


def family_for(graph: pygraph) -> EngineFamily | None:
    """The graph's family: a pure property of its nodes, whatever the machine."""
    types = [node.type for node in graph.nodes]
    if ANONYMOUS.issuperset(types):
        return FAMILIES["pointwise"]
    named = [family for each in types for family in FAMILIES.values() if each in family.anchors]
    return named[0] if len(named) == 1 else None


def facts_of(graph: pygraph, family: EngineFamily | None) -> Any:
    """The record of a graph, None without a family: parsed once for each analyzer, and hung on the frozen graph.

    Ranking and every engine read this one record. A graph that can still change is parsed anew at every call.
    """
    if family is None:
        return None
    analyze = resolve(family.analyzer)
    if not graph.frozen:
        return analyze(graph)
    parsed: dict[Callable[..., Any], Any] = graph.__dict__.setdefault("_facts", {})
    if analyze not in parsed:
        parsed[analyze] = analyze(graph)
    return parsed[analyze]


def instantiate(family: EngineFamily, slot: EngineSlot) -> BaseEngine:
    engine: BaseEngine = resolve(slot.factory)(ids.engine_id(family.name, slot.slot))
    return engine


def engine_for_id(number: int) -> tuple[EngineFamily, EngineSlot]:
    """The family and slot behind a Python engine's id; nothing needs to be loaded first."""
    name, slot_number = ids.decode(number)
    family = FAMILIES.get(name)
    for slot in family.slots if family else ():
        if slot.slot == slot_number:
            return family, slot  # type: ignore[return-value]
    raise ValueError(f"engine id {number} names no engine of this release")
