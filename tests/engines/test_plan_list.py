"""The plan list by position, what is deselected from it, and replay of one plan by its identity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cudnn_jax.engines import ids, planning
from cudnn_jax.engines.base import BaseEngine, Inline, PlanConfig, Program
from cudnn_jax.engines.manifest import EngineSlot
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.engines.target import CPU, Target
from cudnn_jax.graph import GraphNotSupportedError, data_type
from support.standin import family

BUILT: list[str] = []
FIRST_ID = ids.engine_id("sdpa_fwd", 1)


class Sized(BaseEngine):
    """A plan for each size of workspace; the one without any is inlined."""

    name = "sized"
    kind = "test"

    def configs(self, graph: Any, facts: Any, target: Target) -> Any:
        return [(("bytes", 4096),), (("bytes", 256),), (("bytes", 0),)]

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
def _engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    BUILT.clear()
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
    with pytest.raises(NotImplementedError, match="bytes -1, serves 0 or more"):
        graph.build_plan_at_index(0)
    with pytest.raises(GraphNotSupportedError, match="pinned plan sized:bytes=-1 cannot serve"):
        graph.build_plans()


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


def test_when_all_are_deselected_the_error_says_so() -> None:
    graph = planned()
    graph.deselect_engines(["sized", "xla"])
    with pytest.raises(GraphNotSupportedError, match=r"sized:bytes=256: deselected by name(.|\n)*xla: deselected"):
        graph.build_plans()
    assert BUILT == []


def test_a_plan_replays_by_its_identity_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sized, "configs", lambda *_: pytest.fail("asked to rank"))
    graph = attention()
    # A setting that nobody would rank is replayed too: it is what a record says.
    graph.create_execution_plan(FIRST_ID, {"bytes": 512})
    assert [plan.name for plan in graph.plans] == ["sized:bytes=512"]
    config, _ = graph.build_plans()
    assert (config.engine_id, config.knobs, config.workspace) == (FIRST_ID, (("bytes", 512),), 512)
    with pytest.raises(RuntimeError, match="planned once"):
        graph.create_execution_plans()


def test_an_identity_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="engine id 20550 names no engine of this release"):
        attention().create_execution_plan(20_550)
    with pytest.raises(GraphNotSupportedError, match="engine id 20699 is xla of sdpa_bwd, the graph is of sdpa_fwd"):
        attention().create_execution_plan(20_699)
    graph = attention()
    graph.create_execution_plan(4, {"k2": 1})
    with pytest.raises(GraphNotSupportedError, match=r"pinned plan cudnn/4:k2=1 cannot serve(.|\n)*platform cpu"):
        graph.build_plans()
