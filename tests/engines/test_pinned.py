"""Which cuDNN plans are built for no other to stand in where cuDNN's version differs: those that somebody chose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from cudnn_jax.engines import backend
from cudnn_jax.engines.base import PlanConfig, Program
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import data_type

PLAN = PlanConfig(4, (("k2", 1),), engine="cudnn", kind="cudnn", mode="A")


@dataclass
class Session:
    pinned: list[bool] = field(default_factory=list)

    def build(self, config: PlanConfig, *, pinned: bool = False) -> Program:
        self.pinned.append(pinned)
        return Program(b"", 0, "")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    made = Session()
    monkeypatch.setattr(backend, "propose", lambda *args: (made, [PLAN], []))
    return made


def planned(**options: Any) -> pygraph:
    graph = pygraph(io_data_type=data_type.FLOAT, compute_data_type=data_type.FLOAT)
    a, b = (graph.tensor(dim=[1, 4, 4], stride=[16, 4, 1]) for _ in range(2))
    graph.matmul(a, b).set_output(True)
    graph.create_execution_plans(target=Target("cuda", sm=90), **options)
    return graph


@pytest.mark.parametrize(("implementation", "pinned"), [(None, False), ("cudnn", False), (PLAN.name, True)])
def test_a_plan_that_is_asked_for_by_name_is_pinned(session: Session, implementation: str | None, pinned: bool) -> None:
    graph = planned(implementation=implementation)
    graph.build_plans()
    assert session.pinned == [pinned]


def test_a_plan_that_is_selected_is_pinned(session: Session) -> None:
    graph = planned()
    graph.select_plan([plan.name for plan in graph.plans].index(PLAN.name))
    graph.build_plans()
    assert session.pinned == [True]


def test_a_plan_that_was_built_before_it_was_selected_is_built_again(session: Session) -> None:
    graph = planned()
    index = [plan.name for plan in graph.plans].index(PLAN.name)
    graph.build_plan_at_index(index)
    graph.select_plan(index)
    graph.build_plans()
    assert session.pinned == [False, True]
