"""Planning: a graph, ranked ways to run it in ONE list, and the first of them that builds."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from cudnn_jax import _ffi
from cudnn_jax import graph as graph_room
from cudnn_jax.engines import backend, cache, execution, manifest, records, saved
from cudnn_jax.engines.base import DECLINES, Artifact, Decline, PlanConfig, Program
from cudnn_jax.engines.notes import behavior_note, numerical_note, parse
from cudnn_jax.engines.planner import Planner, Request, derived_graph, knob_pairs, one_line, subject
from cudnn_jax.engines.program import program_of
from cudnn_jax.engines.store import Stored
from cudnn_jax.engines.target import CPU, Target
from cudnn_jax.graph import GraphNotSupportedError

DEFAULT_MODES = ("A", "FALLBACK")


class pygraph(graph_room.pygraph):
    """A graph that can be planned: what `cudnn_jax.pygraph` is.

    Planning is one-shot and freezes the graph. `plans` is then the ranked list, `declines` says in one line each why
    an engine or a plan is not in it, and `build_plans` builds the first that builds.
    """

    def validate(self, target: Target | None = None) -> None:
        """Checks the graph, and freezes it unless a node runs in engines of Python alone (`python_only`).

        A graph that the cuDNN backend can lower is lowered, where there is a GPU to lower it for, so that what cuDNN
        refuses is told here and not while plans are made. A graph with a node that cuDNN has not stays open: a change
        then undoes what was found (`validated`), and planning checks it again.

        Args:
          target: what to lower for; the first GPU of this machine if absent, and nothing where there is none.

        Raises:
          GraphValidationError: the graph breaks a rule.
          GraphNotSupportedError: cuDNN refuses the graph, in its own words. The graph stays open, and engines of Python
            may serve it all the same: `create_execution_plans` asks them.
        """
        self._check()
        if self.python_only:
            return
        if target is None:
            target = execution.target_of(None)
        with contextlib.suppress(_ffi.LibraryNotFound):
            _lower(self, target)
        self.freeze()

    def create_execution_plans(
        self,
        modes: Sequence[str] = DEFAULT_MODES,
        *,
        target: Target = CPU,
        implementation: str | None = None,
    ) -> None:
        """Freezes the graph and ranks the plans for `target`.

        Args:
          modes: heuristic modes in order of preference: "A" and "B", our kernels and what cuDNN ranks; "FALLBACK", what
            cuDNN takes to serve anything; "OPENSOURCE", our kernels without cuDNN. The reference engine is behind all.
          target: what the plan will run on.
          implementation: None for all; else "cudnn", "cutedsl", "cutile", "xla", an engine's name, or a plan's name.

        Raises:
          GraphNotSupportedError: nothing plans the graph, and the message holds every engine's reason, as `declines`
            does from then on; or `implementation` names no engine of the graph, which can be planned all the same.
          RuntimeError: the graph was planned before.
        """
        _planner_of(self, create=Request(target, modes, implementation))

    def create_execution_plan(
        self, engine_id: int, knobs: Mapping[str, int] | Sequence[tuple[str, int]] = (), *, target: Target = CPU
    ) -> None:
        """Plans with one plan, by its identity: what an autotune record holds. Nobody is asked to rank.

        Args:
          engine_id: of a cuDNN engine, or of an engine of the graph's family.
          knobs: names and values, in the engine's own order.
          target: what the plan will run on.

        Raises:
          ValueError: the id names no engine of this release.
          GraphNotSupportedError: the engine is not of the graph's family.
          RuntimeError: the graph was planned before.
        """
        exactly = PlanConfig(engine_id, knob_pairs(knobs))
        _planner_of(self, create=Request(target, DEFAULT_MODES, exactly=exactly))

    @property
    def plans(self) -> tuple[PlanConfig, ...]:
        """The ranked plan list."""
        return tuple(_planner_of(self).plans)

    @property
    def declines(self) -> tuple[Decline, ...]:
        """Why an engine, a mode or a plan is not used; grows while plans are built."""
        return tuple(_planner_of(self).declines)

    def get_execution_plan_count(self) -> int:
        """Length of `plans`."""
        return len(_planner_of(self).plans)

    def get_plan_name_at_index(self, index: int) -> str:
        """The plan's name, as `implementation=` takes it."""
        planner, index = self._checked(index, "get_plan_name_at_index")
        return planner.plans[index].name

    def select_plan(self, index: int) -> None:
        """Pins the plan at `index`: if it declines, building raises instead of running something else."""
        _, index = self._checked(index, "select_plan")
        self._reopened().pin(index)
        self.__dict__.get("_executions", {}).pop(index, None)

    def deselect_engines(self, names: Sequence[str]) -> None:
        """Leaves out the plans of these engines, such as "xla", and plans of these names, such as "cudnn/4:k2=1"."""
        if isinstance(names, str):
            raise TypeError(f"deselect_engines({names!r}): the rule: a sequence of names")
        barred = frozenset(names)
        self._reopened().bar(
            lambda plan: (
                "deselected by name" if barred & {plan.engine, plan.name, plan.name.partition(":")[0]} else None
            )
        )

    def deselect_workspace_greater_than(self, nbytes: int) -> None:
        """Leaves out plans that need more than `nbytes` bytes of workspace, as building them tells."""
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
            raise ValueError(f"deselect_workspace_greater_than({nbytes!r}): the rule: bytes, an int of at least 0")
        self._reopened().bar(
            lambda plan: (
                f"workspace {plan.workspace} bytes, at most {nbytes} selected"
                if (plan.workspace or 0) > nbytes
                else None
            )
        )

    def select_numeric_notes(self, notes: Sequence[numerical_note | str]) -> None:
        """Leaves out plans that do not have every one of these numerical notes."""
        self._require(parse("select_numeric_notes", notes, numerical_note))

    def deselect_numeric_notes(self, notes: Sequence[numerical_note | str]) -> None:
        """Leaves out plans that have one of these numerical notes."""
        self._refuse(parse("deselect_numeric_notes", notes, numerical_note))

    def select_behavior_notes(self, notes: Sequence[behavior_note | str]) -> None:
        """Leaves out plans that do not have every one of these behavior notes."""
        self._require(parse("select_behavior_notes", notes, behavior_note))

    def deselect_behavior_notes(self, notes: Sequence[behavior_note | str]) -> None:
        """Leaves out plans that have one of these behavior notes."""
        self._refuse(parse("deselect_behavior_notes", notes, behavior_note))

    def _require(self, notes: frozenset[str]) -> None:
        self._reopened().bar(lambda plan: _listed("deselected: lacks the note", notes - plan.notes))

    def _refuse(self, notes: frozenset[str]) -> None:
        self._reopened().bar(lambda plan: _listed("deselected: has the note", notes & plan.notes))

    def build_plans(self) -> tuple[PlanConfig, Artifact]:
        """Builds the pinned plan, or the first of the list that builds.

        Raises:
          GraphNotSupportedError: nothing builds; the message holds every engine's reason.
        """
        planner = _planner_of(self)
        return planner.build(planner.first())

    def build_plan_at_index(self, index: int) -> tuple[PlanConfig, Artifact]:
        """Builds the plan at `index` and no other; a decline raises."""
        planner, index = self._checked(index, "build_plan_at_index")
        return planner.build(index)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        """Bytes of workspace of the plan at `index`, which is built for it."""
        planner, index = self._checked(index, "get_workspace_size_plan_at_index")
        return planner.build(index)[0].workspace or 0

    def serialize(self) -> bytes:
        """The graph and the plan that runs, as bytes for another process on the same kind of device.

        The plan is the pinned one, or the first of the list that builds; the program built of it is inside. The bytes
        are the same in every process and on every Python.

        Raises:
          GraphNotSupportedError: nothing builds; the message holds every engine's reason.
          RuntimeError: the graph was not planned yet.
        """
        planner = _planner_of(self)
        config, artifact = planner.build(planner.first())
        return saved.to_bytes(self, planner.target, _stored(config, artifact, (config,), ()))

    @classmethod
    def deserialize(cls, data: bytes, target: Target | None = None) -> Self:
        """The planned graph that `serialize` wrote, frozen, its program as it was built: nothing is ranked or compiled.

        A program is code: load only bytes from where you trust.

        Args:
          data: what `serialize` gave.
          target: what will run it; if absent the first GPU of this machine, or, where there is none, any device of the
            kind that the bytes name.

        Raises:
          ValueError: the bytes are damaged, of another version, or no plan.
          GraphNotSupportedError: they are for another release of this package, another version of cuDNN or CuTe-DSL, or
            another device; one line says what they need and what is here.
        """
        graph, target, stored = saved.from_bytes(cls, data, target, partial(execution.target_of, None))
        artifact = _artifact_of(graph, target, manifest.family_for(graph), stored)
        if artifact is None:
            raise GraphNotSupportedError(f"plan: {stored.plan.name} is built otherwise in this release; build it anew")
        request = Request(target, DEFAULT_MODES, exactly=stored.plan)
        graph.__dict__["_planner"] = Planner(graph, request, built=(stored.plan, artifact))
        return graph

    def _reopened(self) -> Planner:
        """The planner, with the choice of a plan open again."""
        planner = _planner_of(self)
        self.__dict__.pop("_execution", None)
        return planner

    def _checked(self, index: int, caller: str) -> tuple[Planner, int]:
        planner = _planner_of(self)
        return planner, planner.check_index(index, caller)

    def get_workspace_size(self) -> int:
        """Bytes of workspace that `execute` takes. Plans for this machine and builds what is not planned or built."""
        return _execution_of(self, None).workspace_size

    def execute(self, buffers: Mapping[Any, Any], workspace: Any = None, handle: _ffi.Handle | None = None) -> None:
        """Runs the graph on buffers of the caller, outside of JAX.

        The first call plans and builds what is not planned or built yet, for the handle's device, or for the CPU on a
        machine without a GPU. On CUDA a call returns when the work is queued on the handle's stream (without a handle,
        the default stream of the first device); memory must live until it is done. No two calls share a buffer that
        one of them writes unless streams order them.

        Args:
          buffers: every input and output of the graph, by tensor or by uid: a DLPack producer (torch, jax, cupy,
            numpy), an object with `__cuda_array_interface__`, on the CPU one with `__array_interface__`, a
            `DeviceView`, or an address as an int, of which nothing can be checked. Dims and data type are the
            tensor's, and so are strides unless the plan's artifact says `any_strides`, as the reference engine's
            does; an axis of length 1 has any stride. Outputs are written in place, and overlap no other
            buffer; a jax.Array cannot be one. Addresses are multiples of 16 bytes.
          workspace: such a buffer of at least `get_workspace_size()` bytes without gaps, at a multiple of 256 bytes on
            CUDA; None where that is 0.
          handle: what `cudnn_jax.create_handle` made.

        Raises:
          ValueError: a buffer is missing, or one too many, or on another device, or of another data type, dim or
            stride than the tensor, or an output is read-only; the message names the tensor, what came and the rule.
          TypeError: something is no buffer, or `handle` is no Handle.
          RuntimeError: the handle was destroyed, the graph was planned for another device, or the launch failed.
          GraphNotSupportedError: nothing builds, or what builds runs inside JAX only.
        """
        ready = self.__dict__.get("_execution")
        if ready is None:
            ready = _execution_of(self, handle)
        ready.run(buffers, workspace, handle)

    def execute_plan_at_index(
        self, buffers: Mapping[Any, Any], workspace: Any, index: int, handle: _ffi.Handle | None = None
    ) -> None:
        """As `execute`, with the plan at `index` instead of the one that was chosen."""
        _, index = self._checked(index, "execute_plan_at_index")
        _execution_of(self, handle, index).run(buffers, workspace, handle)


def _listed(what: str, notes: frozenset[str]) -> str | None:
    return f"{what} {', '.join(sorted(notes))}" if notes else None


@dataclass(frozen=True)
class Planned:
    """The outcome of planning one operation: what runs, and why the rest does not."""

    plan: PlanConfig
    artifact: Artifact
    plans: tuple[PlanConfig, ...]
    declines: tuple[Decline, ...]
    family: str | None
    facts: Any
    subject: str
    """What was planned, in one line for people."""
    origin: str = "planned here"
    """Where it comes from: planned in this process, an autotune record and its time, or the folder that it was found in
    and the release that made it."""


_MEMO_SIZE = 256
_memo: OrderedDict[tuple[Any, ...], Planned] = OrderedDict()
_memo_lock = threading.Lock()


def plan(graph: pygraph, target: Target, implementation: str | None = None) -> Planned:
    """Plans and builds `graph` for `target`, once for each (graph hash, target, implementation) in this process.

    The plan that came with a graph from `deserialize`, and else the plan of an autotune record, goes ahead of the
    ranking, where the user names no `implementation`. Freezes the graph, and leaves its own one planning to the caller.
    """
    graph.freeze()
    family = manifest.family_for(graph)
    if implementation is None and (given := _given(graph, target)):
        return given
    opted = tuple(manifest.opt_ins(family))
    record = records.find(graph, target) if implementation is None else None
    key = (graph.hash(), target, implementation, family, opted, record)
    with _memo_lock:
        if key in _memo:
            _memo.move_to_end(key)
            return _memo[key]
    planned = _recorded(graph, target, family, record) if record else None
    if planned is None:
        planned = _found_or_planned(graph, target, family, implementation)
    with _memo_lock:
        _memo[key] = planned
        while len(_memo) > _MEMO_SIZE:
            _memo.popitem(last=False)
    return planned


def _given(graph: pygraph, target: Target) -> Planned | None:
    """The plan that came with the graph, where it is for this device."""
    planner: Planner | None = graph.__dict__.get("_planner")
    if planner is None or not planner.is_given or not saved.same_device(planner.target, target):
        return None
    config, artifact = planner.build(0)
    name = planner.family.name if planner.family else None
    return Planned(config, artifact, (config,), (), name, planner.facts, planner.subject, "came with the graph")


def _recorded(
    graph: pygraph, target: Target, family: manifest.EngineFamily | None, record: records.Record
) -> Planned | None:
    """What a record says to run; None, with a warning, where it does not hold here any more."""
    try:
        if reason := record.outdated():
            raise GraphNotSupportedError(reason)
        planned = _found_or_planned(graph, target, family, None, record.plan)
    except DECLINES as error:
        records.ignore(graph, target, record, subject(graph, manifest.facts_of(graph, family)), one_line(error))
        return None
    return replace(planned, origin=f"autotune record, {record.ms:.4g} ms")


def _found_or_planned(
    graph: pygraph,
    target: Target,
    family: manifest.EngineFamily | None,
    implementation: str | None,
    chosen: PlanConfig | None = None,
) -> Planned:
    for stored, origin in cache.found(graph, target, implementation, chosen):
        if restored := _restored(graph, target, family, stored, origin):
            return restored
    return _planned(graph, target, implementation, chosen)


def _planned(graph: pygraph, target: Target, implementation: str | None, chosen: PlanConfig | None) -> Planned:
    """Ranks, and builds the first plan that builds, or the one that is `chosen` of the list."""
    planner = Planner(graph, Request(target, DEFAULT_MODES, implementation))
    config, artifact = planner.build(planner.first() if chosen is None else planner.position(chosen))
    plans, declines = tuple(planner.plans), tuple(planner.declines)
    name = planner.family.name if planner.family else None
    planned = Planned(config, artifact, plans, declines, name, planner.facts, planner.subject)
    if not planner.transient:
        cache.keep(graph, target, implementation, stored_of(planned), chosen)
    return planned


def stored_of(planned: Planned) -> Stored:
    """What is kept on disk of an outcome."""
    return _stored(planned.plan, planned.artifact, planned.plans, planned.declines)


def _stored(
    plan: PlanConfig, artifact: Artifact, plans: tuple[PlanConfig, ...], declines: tuple[Decline, ...]
) -> Stored:
    program = artifact if isinstance(artifact, Program) else None
    return Stored(
        plan=plan,
        plans=plans,
        declines=declines,
        program=program.data if program else None,
        derived=program is not None and program.prepare is not None,
    )


def _restored(
    graph: pygraph, target: Target, family: manifest.EngineFamily | None, stored: Stored, origin: str
) -> Planned | None:
    """What an earlier process found, None where this release makes something else of it."""
    artifact = _artifact_of(graph, target, family, stored)
    if artifact is None:
        return None
    facts = manifest.facts_of(graph, family)
    name = family.name if family else None
    return Planned(stored.plan, artifact, stored.plans, stored.declines, name, facts, subject(graph, facts), origin)


def _artifact_of(
    graph: pygraph, target: Target, family: manifest.EngineFamily | None, stored: Stored
) -> Artifact | None:
    """The artifact of a stored plan; one that is inlined is built again. None if it is something else here."""
    if stored.program is None:
        try:
            owner, slot = manifest.engine_for_id(stored.plan.engine_id)
            own = manifest.facts_of(graph, owner)
            return manifest.instantiate(owner, slot).build_plan(graph, own, stored.plan, target)
        except (ValueError, *DECLINES):
            return None
    try:
        program = program_of(stored.program)
    except ValueError:  # of another layout
        return None
    if not stored.derived:
        return program
    derived = derived_graph(family, graph, manifest.facts_of(graph, family))
    return derived.attach(program) if derived else None


def clear_memo() -> None:
    """Forgets every planned graph of this process, for example after a library was installed."""
    with _memo_lock:
        _memo.clear()


def _lower(graph: pygraph, target: Target) -> None:
    """Lowers what planning would ask cuDNN for, on a target that cuDNN serves."""
    if backend.out_of_reach(target):
        return
    family = manifest.family_for(graph)
    try:
        derived = derived_graph(family, graph, manifest.facts_of(graph, family))
    except DECLINES as error:
        raise GraphNotSupportedError(one_line(error)) from None
    backend.lower(derived.graph if derived else graph, target)


def _planner_of(graph: pygraph, create: Request | None = None) -> Planner:
    planner: Planner | None = graph.__dict__.get("_planner")
    if create is None:
        if planner is None:
            raise RuntimeError("call create_execution_plans first")
        return planner
    if planner is not None:
        raise RuntimeError("a graph is planned once: build a new graph to plan differently, or use select_plan")
    graph.freeze()
    graph.__dict__["_planner"] = planner = Planner(graph, create)
    if not planner.plans:
        raise GraphNotSupportedError(planner.refusal())
    return planner


def _execution_of(graph: pygraph, handle: _ffi.Handle | None, index: int | None = None) -> execution.Execution:
    """The execution of the plan at `index`, or of the one that `build_plans` chooses, which is then settled."""
    with execution.lock:
        if "_planner" not in graph.__dict__:
            graph.create_execution_plans(target=execution.target_of(handle))
        planner = _planner_of(graph)
        made: dict[int, execution.Execution] = graph.__dict__.setdefault("_executions", {})
        at = planner.first() if index is None else index
        _, artifact = planner.build(at)  # first, as it may be deselected by now
        if at not in made:
            made[at] = execution.prepare(graph, planner.target, artifact)
        if index is None:
            graph.__dict__["_execution"] = made[at]
        return made[at]
