"""Planning: a graph, ranked ways to run it in ONE list, and the first of them that builds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cudnn_jax import graph as graph_room
from cudnn_jax.engines import backend, manifest
from cudnn_jax.engines.base import DECLINES, Artifact, BaseEngine, Decline, Derived, PlanConfig, Program
from cudnn_jax.engines.target import CPU, Target
from cudnn_jax.graph import GraphNotSupportedError

DEFAULT_MODES = ("A", "FALLBACK")


class pygraph(graph_room.pygraph):
    """A graph that can be planned: what `cudnn_jax.pygraph` is.

    Planning is one-shot and freezes the graph. `plans` is then the ranked list, `declines` says in one line each why
    an engine or a plan is not in it, and `build_plans` builds the first that builds.
    """

    def create_execution_plans(
        self,
        modes: Sequence[str] = DEFAULT_MODES,
        *,
        target: Target = CPU,
        implementation: str | None = None,
    ) -> None:
        """Freezes the graph and ranks the plans for `target`.

        Args:
          modes: heuristic modes in order of preference: "A", "FALLBACK", "OPENSOURCE".
          target: what the plan will run on.
          implementation: None for all; else "cudnn", "cutedsl", "cutile", "xla", an engine's name, or a plan's name.

        Raises:
          RuntimeError: the graph was planned before.
        """
        _planner_of(self, create=(target, tuple(modes), implementation))

    @property
    def plans(self) -> tuple[PlanConfig, ...]:
        """The ranked plan list."""
        return tuple(_planner_of(self).plans)

    @property
    def declines(self) -> tuple[Decline, ...]:
        """Why an engine, a mode or a plan is not used; grows while plans are built."""
        return tuple(_planner_of(self).declines)

    def select_plan(self, index: int) -> None:
        """Pins the plan at `index`: if it declines, building raises instead of running something else."""
        planner = _planner_of(self)
        if not 0 <= index < len(planner.plans):
            raise IndexError(f"select_plan({index}): the list has {len(planner.plans)} plans")
        planner.pinned = index

    def build_plans(self) -> tuple[PlanConfig, Artifact]:
        """Builds the pinned plan, or the first of the list that builds.

        Raises:
          GraphNotSupportedError: nothing builds; the message holds every engine's reason.
        """
        return _planner_of(self).build()


class _Planner:
    """The plans of one frozen graph on one target."""

    def __init__(self, graph: pygraph, target: Target, modes: Sequence[str], implementation: str | None) -> None:
        self.graph = graph
        self.target = target
        self.implementation = implementation
        self.pinned: int | None = None
        self.declines: list[Decline] = []
        self.family = manifest.family_for(graph)
        self.facts: Any = manifest.resolve(self.family.analyzer)(graph) if self.family else None
        self._engines: dict[int, BaseEngine] = {}
        self._derived: Derived | None = None
        offered = self._offered()
        self._session, proposed = self._backend(modes)
        ranked = self._rank(modes, offered, proposed)
        self.plans = [plan for plan in dict.fromkeys(ranked) if _selected(plan, implementation)]

    def _offered(self) -> list[PlanConfig]:
        """One entry for each knob setting of each of the family's engines that accepts the graph."""
        configs: list[PlanConfig] = []
        for slot in self.family.slots if self.family else ():
            if not slot.offered():
                self.declines.append(Decline(slot.name, f"opt-in: set {slot.opt_in}=1"))
                continue
            assert self.family is not None
            engine = manifest.instantiate(self.family, slot)
            try:
                for knobs in engine.configs(self.graph, self.facts, self.target):
                    configs.append(PlanConfig(engine.engine_id, knobs, engine=engine.name, kind=engine.kind, mode="A"))
            except DECLINES as error:
                self.declines.append(Decline(engine.name, _line(error)))
                continue
            self._engines[engine.engine_id] = engine
        return configs

    def _backend(self, modes: Sequence[str]) -> tuple[backend.BackendSession | None, list[PlanConfig]]:
        if not _may_be_backend(self.implementation):
            return None, []
        try:
            graph, facts = self._asked()
        except DECLINES as error:
            self.declines.append(Decline(backend.NAME, _line(error)))
            return None, []
        prefill = self.family.backend_prefill if self.family else None
        words = manifest.resolve(prefill)(facts) if prefill else {}
        session, plans, declines = backend.propose(graph, self.target, modes, words)
        self.declines += declines
        return session, plans

    def _asked(self) -> tuple[graph_room.pygraph, Any]:
        """The graph that cuDNN is asked for and its facts: the user's, or what the family derives of it.

        Raises:
          GraphNotSupportedError: cuDNN is not to be asked, and why.
        """
        graph: graph_room.pygraph = self.graph
        facts = self.facts
        reason = backend.out_of_reach(self.target)
        if reason is None and self.family and self.family.backend_graph:
            self._derived = manifest.resolve(self.family.backend_graph)(graph, facts)
            if self._derived is not None:
                graph, facts = self._derived.graph, manifest.resolve(self.family.analyzer)(self._derived.graph)
        if reason is None and self.family and self.family.backend_limits:
            reason = manifest.resolve(self.family.backend_limits)(facts, self.target)
        if reason:
            raise GraphNotSupportedError(reason)
        return graph, facts

    def _rank(
        self, modes: Sequence[str], offered: list[PlanConfig], proposed: list[PlanConfig]
    ) -> Sequence[PlanConfig]:
        if self.family is None or self.family.heuristics is None:
            return [*offered, *proposed]
        recommend = manifest.resolve(self.family.heuristics)
        ranked: Sequence[PlanConfig] = recommend(modes, self.facts, offered, proposed, self.target)
        return ranked

    def build(self) -> tuple[PlanConfig, Artifact]:
        candidates = self.plans if self.pinned is None else [self.plans[self.pinned]]
        for config in candidates:
            try:
                artifact = self._build_one(config)
            except DECLINES as error:
                self.declines.append(Decline(config.name, _line(error)))
                continue
            size = artifact.workspace if isinstance(artifact, Program) else 0
            return replace(config, workspace=size), artifact
        raise GraphNotSupportedError(self._refusal())

    def _build_one(self, config: PlanConfig) -> Artifact:
        engine = self._engines.get(config.engine_id)
        if engine is not None:
            return engine.build_plan(self.graph, self.facts, config, self.target)
        if self._session is None:
            raise GraphNotSupportedError("no engine of that id is offered")
        pinned = self.pinned is not None or self.implementation == config.name
        program = self._session.build(config, pinned=pinned)
        return program if self._derived is None else self._derived.attach(program)

    def _refusal(self) -> str:
        what = f"implementation={self.implementation!r} cannot serve" if self.implementation else "no engine serves"
        if self.pinned is not None:
            what = f"the pinned plan {self.plans[self.pinned].name} cannot serve"
        subject = self.facts.describe() if hasattr(self.facts, "describe") else self.graph.name or "this graph"
        reasons = "".join(f"\n  {decline.engine}: {decline.reason}" for decline in self._relevant())
        return f"{what} {subject} on {self.target.describe()}:{reasons or ' no such engine'}"

    def _relevant(self) -> list[Decline]:
        wanted = self.implementation
        if wanted is None:
            return self.declines
        named = [d for d in self.declines if wanted == d.engine or wanted.split("/")[0] == d.engine.split("/")[0]]
        return named or self.declines


@dataclass(frozen=True)
class Planned:
    """The outcome of planning one operation: what runs, and why the rest does not."""

    plan: PlanConfig
    artifact: Artifact
    plans: tuple[PlanConfig, ...]
    declines: tuple[Decline, ...]
    family: str | None
    facts: Any


_MEMO_SIZE = 256
_memo: OrderedDict[tuple[Any, ...], Planned] = OrderedDict()
_memo_lock = threading.Lock()


def plan(graph: pygraph, target: Target, implementation: str | None = None) -> Planned:
    """Plans and builds `graph` for `target`, once for each (graph hash, target, implementation) in this process."""
    graph.freeze()
    family = manifest.family_for(graph)
    opted = tuple(slot.offered() for slot in family.slots) if family else ()
    key = (graph.hash(), target, implementation, family, opted)
    with _memo_lock:
        if key in _memo:
            _memo.move_to_end(key)
            return _memo[key]
    graph.create_execution_plans(target=target, implementation=implementation)
    config, artifact = graph.build_plans()
    planner = _planner_of(graph)
    planned = Planned(config, artifact, graph.plans, graph.declines, family.name if family else None, planner.facts)
    with _memo_lock:
        _memo[key] = planned
        while len(_memo) > _MEMO_SIZE:
            _memo.popitem(last=False)
    return planned


def clear_memo() -> None:
    """Forgets every planned graph of this process, for example after a library was installed."""
    with _memo_lock:
        _memo.clear()


def _planner_of(graph: pygraph, create: tuple[Target, tuple[str, ...], str | None] | None = None) -> _Planner:
    planner: _Planner | None = graph.__dict__.get("_planner")
    if create is None:
        if planner is None:
            raise RuntimeError("call create_execution_plans first")
        return planner
    if planner is not None:
        raise RuntimeError("a graph is planned once: build a new graph to plan differently, or use select_plan")
    graph.validate()
    graph.freeze()
    graph.__dict__["_planner"] = planner = _Planner(graph, *create)
    return planner


def _may_be_backend(implementation: str | None) -> bool:
    return implementation is None or implementation.split("/")[0] == backend.NAME


def _selected(config: PlanConfig, implementation: str | None) -> bool:
    return implementation is None or implementation in (config.kind, config.engine, config.name)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
