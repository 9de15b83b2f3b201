"""The plan list by position, what is deselected from it, and replay of one plan by its identity."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cudnn_jax.engines import ids, planning
from cudnn_jax.engines.base import BaseEngine, Inline, PlanConfig, Program
from cudnn_jax.engines.manifest import EngineSlot
from cudnn_jax.engines.notes import behavior_note, numerical_note
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.engines.target import CPU, Target
from cudnn_jax.graph import GraphNotSupportedError, data_type
from support.standin import family

BUILT: list[str] = []
SIZES = [4096, 256, 0]
FIRST_ID = ids.engine_id("sdpa_fwd", 1)


class Sized(BaseEngine):
    """A plan for each size of workspace; the one without any is inlined."""

    name = "sized"
    kind = "test"
    notes = frozenset({"TENSOR_CORE", "RUNTIME_COMPILATION"})

    def configs(self, graph: Any, facts: Any, target: Target) -> Any:
        return [(("bytes", size),) for size in SIZES]

    def build_plan(self, graph: Any, facts: Any, config: PlanConfig, target: Target) -> Any:
        BUILT.append(config.name)
        size = dict(config.knobs)["bytes"]
        if size < 0:
            raise NotImplementedError(f"bytes {size}, serves 0 or more")
        if size == 0:
            return Inline(lambda *arrays: arrays[:1])
        builder = ProgramBuilder(graph, target)
        builder.workspace(size)
        return builder.build()


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    BUILT.clear()
    if "declines_at_its_position" in request.node.name:
        monkeypatch.setitem(globals(), "SIZES", [-1])
    planning.clear_memo()
    with family(monkeypatch, "sdpa_fwd", EngineSlot(1, "sized", (__name__, "Sized"))):
        yield
    planning.clear_memo()


def attention() -> pygraph:
    graph = pygraph(io_data_type=data_type.FLOAT)
    q, k, v = (graph.tensor((2, 4, 16, 32)) for _ in range(3))
    out, _ = graph.sdpa(q, k, v, generate_stats=False)
    out.set_output(True)
    return graph


def planned() -> pygraph:
    graph = attention()
    graph.create_execution_plans(target=CPU)
    return graph


def test_the_list_is_read_and_built_by_position() -> None:
    graph = planned()
    assert graph.get_execution_plan_count() == 4
    names = [graph.get_plan_name_at_index(index) for index in range(4)]
    assert names == ["sized:bytes=4096", "sized:bytes=256", "sized:bytes=0", "xla"] and BUILT == []
    assert [graph.get_workspace_size_plan_at_index(index) for index in (1, 0, 2, 3)] == [256, 4096, 0, 0]
    config, artifact = graph.build_plan_at_index(1)
    assert (config.name, config.workspace) == ("sized:bytes=256", 256) and isinstance(artifact, Program)
    # Each plan is built once, and building one chooses none.
    assert BUILT == ["sized:bytes=256", "sized:bytes=4096", "sized:bytes=0"]
    assert graph.build_plans()[0].name == "sized:bytes=4096"


def test_a_copy_of_a_planned_graph_is_open_and_not_planned() -> None:
    graph = planned()
    for other in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)):
        assert type(other) is pygraph and not other.frozen and other.hash() == graph.hash()
        other.create_execution_plans(target=CPU)
        assert other.plans == graph.plans


@pytest.mark.parametrize("index", [-1, 4])
@pytest.mark.parametrize(
    "call", ["get_plan_name_at_index", "build_plan_at_index", "get_workspace_size_plan_at_index", "select_plan"]
)
def test_a_position_outside_the_list_is_named(call: str, index: int) -> None:
    with pytest.raises(IndexError, match=rf"_plan.*\({index}\): the list has 4 plans"):
        getattr(planned(), call)(index)
    with pytest.raises(TypeError, match="the rule: the position of a plan"):
        getattr(planned(), call)(True)


def test_a_plan_that_declines_at_its_position_raises() -> None:
    graph = attention()
    graph.create_execution_plan(FIRST_ID, {"bytes": -1})
    for _ in range(2):  # it is built no second time
        with pytest.raises(NotImplementedError, match="bytes -1, serves 0 or more"):
            graph.build_plan_at_index(0)
        with pytest.raises(GraphNotSupportedError, match="pinned plan sized:bytes=-1 cannot serve"):
            graph.build_plans()
    assert BUILT == ["sized:bytes=-1"] and len(graph.declines) == 1


def test_a_workspace_limit_is_judged_by_what_a_plan_needs() -> None:
    graph = planned()
    graph.deselect_workspace_greater_than(1000)
    assert graph.build_plans()[0].name == "sized:bytes=256"
    assert [(d.engine, d.reason) for d in graph.declines if d.engine.startswith("sized")] == [
        ("sized:bytes=4096", "workspace 4096 bytes, at most 1000 selected")
    ]
    with pytest.raises(GraphNotSupportedError, match="at most 1000"):
        graph.build_plan_at_index(0)
    graph.deselect_workspace_greater_than(100)
    assert graph.build_plans()[0].name == "sized:bytes=0"
    assert graph.get_execution_plan_count() == 4  # positions stay


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["sized"], "xla"),
        (["sized:bytes=4096"], "sized:bytes=256"),
        (["xla"], "sized:bytes=4096"),
    ],
)
def test_engines_and_plans_are_deselected_by_name(names: list[str], left: str) -> None:
    graph = planned()
    graph.deselect_engines(names)
    assert graph.build_plans()[0].name == left
    with pytest.raises(TypeError, match="a sequence of names"):
        graph.deselect_engines("xla")


@pytest.mark.parametrize(
    ("call", "notes", "left"),
    [
        ("select_numeric_notes", [numerical_note.TENSOR_CORE], "sized:bytes=4096"),
        ("select_numeric_notes", [], "sized:bytes=4096"),
        ("deselect_numeric_notes", ["TENSOR_CORE", "FFT"], "xla"),
        ("deselect_numeric_notes", [numerical_note.FFT], "sized:bytes=4096"),
        ("select_behavior_notes", ["RUNTIME_COMPILATION"], "sized:bytes=4096"),
        ("deselect_behavior_notes", [behavior_note.RUNTIME_COMPILATION], "xla"),
    ],
)
def test_plans_are_selected_by_notes(call: str, notes: list[str], left: str) -> None:
    graph = planned()
    getattr(graph, call)(notes)
    assert graph.build_plans()[0].name == left


def test_a_plan_without_one_of_the_notes_is_left_out_and_says_so() -> None:
    graph = planned()
    graph.select_numeric_notes(["TENSOR_CORE", "WINOGRAD"])
    with pytest.raises(GraphNotSupportedError, match=r"sized:bytes=0: deselected: lacks the note WINOGRAD\n"):
        graph.build_plans()


@pytest.mark.parametrize(
    ("call", "notes", "error", "message"),
    [
        ("select_numeric_notes", "FFT", TypeError, "a sequence of notes"),
        ("deselect_numeric_notes", ["RUNTIME_COMPILATION"], ValueError, "'RUNTIME_COMPILATION' is none of TENSOR_CORE"),
        ("deselect_behavior_notes", ["FFT"], ValueError, "'FFT' is none of RUNTIME_COMPILATION"),
    ],
)
def test_what_is_no_note_is_named(call: str, notes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"{call}.*{message}"):
        getattr(planned(), call)(notes)


def test_when_all_are_deselected_the_error_says_so() -> None:
    graph = planned()
    graph.deselect_engines(["sized", "xla"])
    with pytest.raises(GraphNotSupportedError, match=r"sized:bytes=256: deselected by name(.|\n)*xla: deselected"):
        graph.build_plans()
    assert BUILT == []


def test_a_plan_replays_by_its_identity_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudnn_jax.engines.sdpa.heuristics.recommend", lambda *_: pytest.fail("asked to rank"))
    graph = attention()
    graph.create_execution_plan(FIRST_ID, {"bytes": 256})
    assert [plan.name for plan in graph.plans] == ["sized:bytes=256"]
    config, _ = graph.build_plans()
    assert (config.engine_id, config.knobs, config.workspace) == (FIRST_ID, (("bytes", 256),), 256)
    with pytest.raises(RuntimeError, match="planned once"):
        graph.create_execution_plans()


@pytest.mark.parametrize("knobs", [{"bytes": 512}, {"byte": 256}, {}, {"bytes": 256, "more": 1}], ids=str)
def test_a_replayed_setting_is_one_that_the_engine_has(knobs: dict[str, int]) -> None:
    with pytest.raises(GraphNotSupportedError, match=r"is no plan of fwd(.|\n)*sized:bytes=4096, sized:bytes=256"):
        attention().create_execution_plan(FIRST_ID, knobs)
    with pytest.raises(GraphNotSupportedError, match="xla:a=1 is no plan of fwd"):
        attention().create_execution_plan(20_599, {"a": 1})


def test_a_replayed_engine_judges_the_graph() -> None:
    graph = pygraph(io_data_type=data_type.FLOAT)
    q, k, v = (graph.tensor((2, 4, 16, 32)) for _ in range(3))
    out, _ = graph.sdpa(graph.relu(q), k, v, generate_stats=False)
    out.set_output(True)
    with pytest.raises(GraphNotSupportedError, match="^xla: .*cannot express"):
        graph.create_execution_plan(20_599)


def test_a_plan_that_ran_and_is_deselected_runs_no_more() -> None:
    graph = planned()
    q, k, v = graph.inputs
    (o,) = graph.outputs
    buffers = {t: np.ones(t.dim, np.float32) for t in (q, k, v, o)}
    graph.execute_plan_at_index(buffers, None, 3)
    graph.deselect_engines(["xla"])
    with pytest.raises(GraphNotSupportedError, match="deselected by name"):
        graph.execute_plan_at_index(buffers, None, 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"modes": "A"}, ValueError, "modes is 'A'"),
        ({"modes": ["Z"]}, ValueError, r"a sequence of A, B, FALLBACK, OPENSOURCE"),
        ({"target": "cpu"}, TypeError, "target is 'cpu'; the rule: a Target"),
    ],
)
def test_what_is_planned_for_is_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention().create_execution_plans(**options)


@pytest.mark.parametrize("nbytes", [-1, "x", True, 1.5])
def test_a_workspace_limit_is_a_number_of_bytes(nbytes: Any) -> None:
    with pytest.raises(ValueError, match="the rule: bytes, an int of at least 0"):
        planned().deselect_workspace_greater_than(nbytes)


def test_positions_are_any_integers() -> None:
    graph = planned()
    graph.select_plan(np.int32(1))
    assert graph.build_plans()[0].name == "sized:bytes=256"


def test_an_identity_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="engine id 20550 names no engine of this release"):
        attention().create_execution_plan(20_550)
    with pytest.raises(GraphNotSupportedError, match="engine id 20699 is xla of sdpa_bwd, the graph is of sdpa_fwd"):
        attention().create_execution_plan(20_699)
    graph = attention()
    graph.create_execution_plan(4, {"k2": 1})
    with pytest.raises(GraphNotSupportedError, match=r"pinned plan cudnn/4:k2=1 cannot serve(.|\n)*platform cpu"):
        graph.build_plans()
