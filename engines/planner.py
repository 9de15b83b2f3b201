"""The ranked plans of one frozen graph on one target, and the artifacts built of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cudnn_jax.engines import backend, ids, manifest
from cudnn_jax.engines.base import (
    DECLINES,
    Artifact,
    BaseEngine,
    Decline,
    Derived,
    PlanConfig,
    Program,
    TransientDecline,
)
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, pygraph
from cudnn_jax.graph.names import printable

MODES = ("A", "B", "FALLBACK", "OPENSOURCE")

_NAMED = 8
"""At most so many plans are named in place of one that there is not."""

Judge = Callable[[PlanConfig], str | None]
"""Why a plan is not to be used, or None. A plan is asked about before it is built, and again with its workspace."""


@dataclass(frozen=True)
class Request:
    """What is planned for: a target, heuristic modes in order of preference, and what `implementation` may name.

    `exactly` asks for one plan by its identity, whatever would be ranked.
    """

    target: Target
    modes: Sequence[str]
    implementation: str | None = None
    exactly: PlanConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.target, Target):
            raise TypeError(f"target is {self.target!r}; the rule: a Target, as engines.target.named makes it")
        if isinstance(self.modes, str) or not set(self.modes) <= set(MODES):
            raise ValueError(f"modes is {self.modes!r}; the rule: a sequence of {', '.join(MODES)}")


class Planner:
    """The one plan list of a graph. `transient` tells whether a decline of the moment had a say in what came out.

    Args:
      built: the one plan of the list and its artifact, where another process planned and built it (`is_given`).
    """

    def __init__(self, graph: pygraph, request: Request, built: tuple[PlanConfig, Artifact] | None = None) -> None:
        self.graph = graph
        self.request = request
        self.target = request.target
        self.declines: list[Decline] = []
        self.family = manifest.family_for(graph)
        self.facts: Any = manifest.facts_of(graph, self.family)
        check_implementation(request.implementation, self.family, self.subject)
        self.pinned: int | None = None
        self._judges: list[Judge] = []
        self._engines: dict[int, tuple[BaseEngine, Any]] = {}
        self._derived: Derived | None = None
        self._session: backend.BackendSession | None = None
        self._built: dict[int, tuple[PlanConfig, Artifact]] = {}
        self._failed: dict[int, Exception] = {}
        self._left_out: list[PlanConfig] = []
        self.transient = False
        self.is_given = built is not None
        if built is not None:
            self.plans = [built[0]]
            self._built[0] = built
        else:
            self.plans = self._replayed(request.exactly) if request.exactly else self._ranked()

    # The list

    def _ranked(self) -> list[PlanConfig]:
        offered = self._offered()
        self._session, proposed = self._proposed()
        ranked: Sequence[PlanConfig] = [*offered, *proposed]
        ranking = (self.family or manifest.GENERIC).heuristics
        if ranking:
            recommend = manifest.resolve(ranking)
            ranked = recommend(self.request.modes, self.facts, offered, proposed, self.target)
        unique = list(dict.fromkeys(ranked))
        chosen = [plan for plan in unique if _selected(plan, self.request.implementation)]
        self._left_out = [plan for plan in unique if plan not in chosen]
        return chosen

    def _replayed(self, wanted: PlanConfig) -> list[PlanConfig]:
        """One plan by its identity: its engine judges the graph, and nobody is asked to rank."""
        if wanted.engine_id in ids.BACKEND_IDS:
            self._session, _ = self._proposed(modes=())
            return [replace(wanted, engine=backend.NAME, kind=backend.NAME)]
        family, slot = manifest.engine_for_id(wanted.engine_id)
        if family not in (self.family, manifest.GENERIC):
            mine = self.family.name if self.family else "no family"
            raise GraphNotSupportedError(
                f"engine id {wanted.engine_id} is {slot.name} of {family.name}, the graph is of {mine}"
            )
        engine = manifest.instantiate(family, slot)
        facts = manifest.facts_of(self.graph, family)
        try:
            offered = engine.configs(self.graph, facts, self.target)
        except DECLINES as error:
            raise GraphNotSupportedError(f"{engine.name}: {one_line(error)}") from error
        knobs = next((each for each in offered if dict(each) == dict(wanted.knobs)), None)
        if knobs is None:
            names = ", ".join(PlanConfig(engine.engine_id, each, engine=engine.name).name for each in offered)
            asked = replace(wanted, engine=engine.name).name
            raise GraphNotSupportedError(f"{asked} is no plan of {self.subject}, which has {names or 'none'}")
        self._engines[engine.engine_id] = engine, facts
        return [_plan_of(engine, knobs)]

    def _offered(self) -> list[PlanConfig]:
        """One entry for each knob setting of each engine that accepts the graph.

        The engines are the family's, and the generic reference where the family has no reference that does.
        """
        configs = self._offered_by(self.family) if self.family else []
        if not any(plan.kind == "xla" for plan in configs):
            configs += self._offered_by(manifest.GENERIC)
        return configs

    def _offered_by(self, family: manifest.EngineFamily) -> list[PlanConfig]:
        mode = next(iter(self.request.modes), None)
        facts = manifest.facts_of(self.graph, family)
        configs: list[PlanConfig] = []
        for slot in family.slots:
            if not slot.offered():
                self._declined(slot.name, f"opt-in: set {slot.opt_in}=1")
                continue
            engine = manifest.instantiate(family, slot)
            try:
                for knobs in engine.configs(self.graph, facts, self.target):
                    configs.append(replace(_plan_of(engine, knobs), mode=mode))
            except DECLINES as error:
                self._declined(engine.name, error)
                continue
            self._engines[engine.engine_id] = engine, facts
        return configs

    def _proposed(self, modes: Sequence[str] | None = None) -> tuple[backend.BackendSession | None, list[PlanConfig]]:
        if not _may_be_backend(self.request.implementation):
            return None, []
        try:
            graph, facts = self._asked()
        except DECLINES as error:
            self._declined(backend.NAME, error)
            return None, []
        prefill = self.family.backend_prefill if self.family else None
        words = manifest.resolve(prefill)(facts) if prefill else {}
        asked = self.request.modes if modes is None else modes
        session, plans, declines = backend.propose(graph, self.target, asked, words)
        self.declines += declines
        return session, plans

    def _asked(self) -> tuple[pygraph, Any]:
        """The graph that cuDNN is asked for and its facts: the user's, or what the family derives of it.

        Raises:
          GraphNotSupportedError: cuDNN is not to be asked, and why.
        """
        graph, facts = self.graph, self.facts
        reason = backend.out_of_reach(self.target)
        if reason is None:
            self._derived = derived_graph(self.family, graph, facts)
            if self._derived is not None:
                graph = self._derived.graph
                facts = manifest.facts_of(graph, self.family)
        if reason is None and self.family and self.family.backend_limits:
            reason = manifest.resolve(self.family.backend_limits)(facts, self.target)
        if reason:
            raise GraphNotSupportedError(reason)
        return graph, facts

    # Choosing

    def check_index(self, index: int, caller: str) -> int:
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise TypeError(f"{caller}({index!r}): the rule: the position of a plan, an int")
        index = operator.index(index)
        if not 0 <= index < len(self.plans):
            raise IndexError(f"{caller}({index}): the list has {len(self.plans)} plans")
        return index

    def position(self, identity: PlanConfig) -> int:
        """The position of a plan.

        Raises:
          GraphNotSupportedError: the list has no such plan.
        """
        if identity not in self.plans:
            raise GraphNotSupportedError(f"{identity.name} is no plan of {self.subject} here")
        return self.plans.index(identity)

    def pin(self, index: int) -> None:
        """Settles on one plan. A program that was built before may not say so, and is built again."""
        self.pinned = index
        if not self.is_given:
            self._built.pop(index, None)

    def bar(self, judge: Judge) -> None:
        """Plans that the judge has a reason against are not used, though they keep their place in the list."""
        self._judges.append(judge)

    def first(self) -> int:
        """The position of the pinned plan, or of the first of the list that builds.

        Raises:
          GraphNotSupportedError: nothing builds; the message holds every engine's reason.
        """
        for index in range(len(self.plans)) if self.pinned is None else [self.pinned]:
            try:
                self.build(index)
            except DECLINES as error:
                self._declined(self.plans[index].name, error)
                continue
            return index
        raise GraphNotSupportedError(self.refusal())

    def build(self, index: int) -> tuple[PlanConfig, Artifact]:
        """Builds one plan, once. Declines by raising one of `DECLINES`."""
        config = self.plans[index]
        self._judge(config)
        if index in self._failed:
            raise self._failed[index]
        if index not in self._built:
            try:
                artifact = self._build(config)
            except DECLINES as error:
                if not isinstance(error, TransientDecline):
                    self._failed[index] = error
                raise
            size = artifact.workspace if isinstance(artifact, Program) else 0
            self._built[index] = replace(config, workspace=size), artifact
        self._judge(self._built[index][0])
        return self._built[index]

    def _judge(self, config: PlanConfig) -> None:
        for judge in self._judges:
            if reason := judge(config):
                raise GraphNotSupportedError(reason)

    def _build(self, config: PlanConfig) -> Artifact:
        if config.engine_id in self._engines:
            engine, facts = self._engines[config.engine_id]
            return engine.build_plan(self.graph, facts, config, self.target)
        if self._session is None:
            raise GraphNotSupportedError("no engine of that id is offered")
        pinned = (
            self.pinned is not None or self.request.exactly is not None or config.name == self.request.implementation
        )
        program = self._session.build(config, pinned=pinned)
        return program if self._derived is None else self._derived.attach(program)

    # Telling

    def _declined(self, name: str, reason: str | Exception) -> None:
        self.transient |= isinstance(reason, TransientDecline)
        decline = Decline(name, reason if isinstance(reason, str) else one_line(reason))
        if decline not in self.declines:
            self.declines.append(decline)

    @property
    def subject(self) -> str:
        return subject(self.graph, self.facts)

    def refusal(self) -> str:
        """Why nothing of the list runs, with every engine's reason."""
        wanted = self.request.implementation
        what = f"implementation={wanted!r} cannot serve" if wanted else "no engine serves"
        if self.pinned is not None or self.request.exactly:
            what = f"the pinned plan {self.plans[self.pinned or 0].name} cannot serve"
        where = f"{self.subject} on {self.target.describe()}"
        engine = _engine_of(wanted or "")
        others = [plan.name for plan in self._left_out if plan.engine == engine]
        if others and not self.plans:
            more = [f"{len(others) - _NAMED} more"] if len(others) > _NAMED else []
            return f"{what} {where}: it is no plan of {engine}, which has {', '.join([*others[:_NAMED], *more])}"
        reasons = "".join(f"\n  {decline.engine}: {decline.reason}" for decline in self._relevant())
        return f"{what} {where}:{reasons or ' no such engine'}"

    def _relevant(self) -> list[Decline]:
        wanted = self.request.implementation
        if wanted is None:
            return self.declines
        named = {engine.name for engine in _engines(self.family) if engine.kind == wanted} | {_engine_of(wanted)}
        return [decline for decline in self.declines if _engine_of(decline.engine) in named] or self.declines


def _plan_of(engine: BaseEngine, knobs: tuple[tuple[str, int], ...]) -> PlanConfig:
    return PlanConfig(engine.engine_id, knobs, engine=engine.name, kind=engine.kind, notes=engine.notes)


def derived_graph(family: manifest.EngineFamily | None, graph: pygraph, facts: Any) -> Derived | None:
    """The graph that the backend is asked for in place of the user's, if there is one."""
    if family is None or family.backend_graph is None:
        return None
    made: Derived | None = manifest.resolve(family.backend_graph)(graph, facts)
    return made


def subject(graph: pygraph, facts: Any = None) -> str:
    """What is planned, in one line for people."""
    if hasattr(facts, "describe"):
        described: str = facts.describe()
        return described
    return printable(graph.name) or "a graph of " + ", ".join(dict.fromkeys(node.type for node in graph.nodes))


def implementations(family: manifest.EngineFamily | None) -> tuple[str, ...]:
    """What `implementation` may name for the graphs of a family: kinds and engines, and beside these their plans."""
    names = (name for engine in _engines(family) for name in (engine.kind, engine.name))
    return tuple(dict.fromkeys([backend.NAME, *names]))


def check_implementation(wanted: str | None, family: manifest.EngineFamily | None, what: str) -> None:
    """Raises GraphNotSupportedError where `wanted` names nothing that plans the graphs of a family, here `what`."""
    if wanted is None:
        return
    known = implementations(family)
    if _engine_of(wanted) not in known:
        rule = f"None, one of {', '.join(known)}, or a plan by its name"
        raise GraphNotSupportedError(f"implementation={wanted!r} cannot serve {what}; the rule: {rule}")


def _engines(family: manifest.EngineFamily | None) -> list[BaseEngine]:
    """The family's, and those behind it."""
    slots = [(each, slot) for each in (family, manifest.GENERIC) if each for slot in each.slots]
    return [manifest.instantiate(each, slot) for each, slot in slots]


def _engine_of(plan: str) -> str:
    """The engine that a plan's name, or its own, begins with."""
    engine = plan.partition(":")[0]
    return backend.NAME if engine.startswith(f"{backend.NAME}/") else engine


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def knob_pairs(knobs: Mapping[str, int] | Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Knobs in the form of a plan's identity."""
    pairs = knobs.items() if isinstance(knobs, Mapping) else knobs
    return tuple((str(name), int(value)) for name, value in pairs)


def _may_be_backend(implementation: str | None) -> bool:
    return implementation is None or _engine_of(implementation) == backend.NAME


def _selected(config: PlanConfig, implementation: str | None) -> bool:
    return implementation is None or implementation in (config.kind, config.engine, config.name)
