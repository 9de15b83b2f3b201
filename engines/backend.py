"""The cuDNN backend's side of planning: its own ranked plans for a graph, and programs made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from cudnn_jax import _ffi
from cudnn_jax.engines import backend_compared, libraries, versions
from cudnn_jax.engines.base import Decline, PlanConfig, Program
from cudnn_jax.engines.manifest import BACKEND_UNPROVEN, opted_in
from cudnn_jax.engines.program import ProgramBuilder, arguments
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, pygraph

NAME = "cudnn"
MODES = ("A", "B", "FALLBACK")
NOT_PLANS = (
    "mode OPENSOURCE: the open-source engines in the frontend's headers are no plans of cuDNN, "
    "and a program cannot carry them"
)


@dataclass
class BackendSession:
    """A graph lowered to cuDNN for one target, and where its plans stand in cuDNN's own list."""

    graph: pygraph
    target: Target
    lowered: _ffi.BackendGraph
    index: dict[PlanConfig, int]
    prefill: Mapping[int, int] = field(default_factory=dict)

    def build(self, config: PlanConfig, *, pinned: bool = False) -> Program:
        """Builds one of the session's plans and serialises it into a program.

        A `pinned` plan is never replaced by another engine's or other knobs' where cuDNN's version differs at run time.
        """
        at = self.index.get(config)
        try:
            if at is None:
                at = self.lowered.create_execution_plan(config.engine_id, dict(config.knobs))
            self.lowered.build_plan(at)
        except _ffi.BackendNotSupported as error:
            raise GraphNotSupportedError(str(error)) from None
        builder = ProgramBuilder(self.graph, self.target, cudnn=versions.cudnn())
        self._prefill(builder)
        size = self.lowered.plan_workspace(at)
        uids = list(self.lowered.uids())
        builder.step(
            "cudnn",
            graph=self.graph.canonical_json(),
            plan=self.lowered.serialize_plan(at),
            engine_id=config.engine_id,
            pinned=pinned,
            knobs=dict(config.knobs),
            uids=uids,
            args=arguments(self.graph, [uid - 1 for uid in uids]),
            workspace=[builder.workspace(size), size],
            device=self.target.properties,
        )
        return builder.build()

    def _prefill(self, builder: ProgramBuilder) -> None:
        """Writes a word over outputs of which the plan may leave parts unwritten."""
        for position, word in self.prefill.items():
            tensor = self.graph.outputs[position]
            nbytes = prod(tensor.dim) * tensor.data_type.itemsize_bits // 8
            # Zeros need no alignment to words, and an output of 2-byte elements may end in half of one.
            width = 1 if word == 0 else 4
            where = ("operand", len(self.graph.inputs) + position)
            builder.step("fill", dest=where, value=word, width=width, bytes=nbytes)


def out_of_reach(target: Target) -> str | None:
    """Why cuDNN cannot serve `target` whatever the graph, or None."""
    return None if target.platform == "cuda" else f"platform {target.platform}, serves cuda"


def lower(graph: pygraph, target: Target) -> _ffi.BackendGraph:
    """`graph` lowered to cuDNN for one target, with every buffer of the caller's found to reach it.

    Raises:
      GraphNotSupportedError: cuDNN refuses the graph, by the decisive line of its reason, or was found to be wrong.
      _ffi.LibraryNotFound: there is no cuDNN here.
    """
    if reason := backend_compared.wrong(graph):
        raise GraphNotSupportedError(reason)
    libraries.locate()
    try:
        return _ffi.BackendGraph(graph.canonical_json(), target.ordinal, target.properties)
    except _ffi.BackendNotSupported as error:
        raise GraphNotSupportedError(str(error)) from None


def propose(
    graph: pygraph, target: Target, modes: Sequence[str], prefill: Mapping[int, int]
) -> tuple[BackendSession | None, list[PlanConfig], list[Decline]]:
    """cuDNN's plans for `graph`, one heuristic mode at a time so that each entry carries its mode.

    `prefill` holds the words to write over outputs first, by position. Where at least one mode has plans, the refusal
    of another is not a decline. Mode "OPENSOURCE" is A without cuDNN's plans, and has none here.
    """
    try:
        lowered = lower(graph, target)
    except (GraphNotSupportedError, _ffi.LibraryNotFound) as error:
        return None, [], [Decline(NAME, str(error))]
    if not opted_in(BACKEND_UNPROVEN) and (what := backend_compared.not_compared(graph)):
        reason = f"{what}: its plans were not compared on a GPU yet; {BACKEND_UNPROVEN}=1 offers them"
        return None, [], [Decline(NAME, reason)]
    session = BackendSession(graph, target, lowered, {}, prefill)
    plans: list[PlanConfig] = []
    refusals: dict[str, None] = {}
    for mode in (mode for mode in modes if mode in MODES):
        seen = lowered.plan_count()
        try:
            lowered.create_execution_plans(mode)
        except _ffi.BackendNotSupported as error:
            refusals[str(error)] = None
            continue
        for at in range(seen, lowered.plan_count()):
            number, knobs = lowered.plan_engine(at)
            notes = frozenset().union(*lowered.plan_notes(at))
            config = PlanConfig(number, tuple(sorted(knobs.items())), engine=NAME, kind=NAME, mode=mode, notes=notes)
            if config not in session.index:
                session.index[config] = at
                plans.append(config)
    reasons = [*(refusals if not plans else ()), *([NOT_PLANS] if "OPENSOURCE" in modes else ())]
    return session, plans, [Decline(NAME, reason) for reason in reasons]
