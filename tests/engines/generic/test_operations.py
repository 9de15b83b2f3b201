"""Every operation of the structured table has a graph among the samples, and a plan on a machine without a GPU."""

from __future__ import annotations

import pytest

from cudnn_jax.engines import ids
from cudnn_jax.engines.target import CPU
from cudnn_jax.graph.linear_attention import LINEAR_ATTENTION
from cudnn_jax.graph.structured import STRUCTURED
from support import operations


def test_every_operation_has_a_sample() -> None:
    elsewhere = {operation.name for operation in LINEAR_ATTENTION}
    assert {name.split()[0] for name in operations.GRAPHS} == set(STRUCTURED) - elsewhere


@pytest.mark.parametrize("name", operations.GRAPHS | operations.FLOAT8)
def test_every_sample_has_a_reference_and_keeps_its_meaning_as_text(name) -> None:
    graph = operations.graph_of(name)
    back = type(graph).from_json(graph.to_json())
    assert back.canonical_json() == graph.canonical_json()
    back.create_execution_plans(target=CPU)
    (plan,) = back.plans
    family = {"rmsnorm": "norm_fwd", "rmsnorm_backward": "norm_bwd"}.get(name, "generic")
    assert plan.engine_id == ids.engine_id(family, ids.REFERENCE_SLOT)
