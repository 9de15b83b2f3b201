"""`cudnn_jax.gdn_step` through a program and the CPU handler: what stands for a batch, and whose buffer the state is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax.engines import manifest
from cudnn_jax.engines.base import Artifact, BaseEngine, PlanConfig
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import pygraph
from support import standin

SLOT = manifest.EngineSlot(1, "still", (__name__, "Still"))


class Still(BaseEngine):
    """Writes zeros over O, and nothing over the states."""

    name = "still"
    kind = "test"

    def configs(self, graph: pygraph, facts: Any, target: Target) -> Sequence[tuple[tuple[str, int], ...]]:
        return [()]

    def build_plan(self, graph: pygraph, facts: Any, config: PlanConfig, target: Target) -> Artifact:
        builder = ProgramBuilder(graph, target)
        out = graph.outputs[facts.results["O"]]
        size = prod(out.dim) * out.data_type.itemsize_bits // 8
        builder.step("fill", dest=builder.operand(out), value=0, width=1, bytes=size)
        return builder.build()


@pytest.fixture(autouse=True)
def _standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with standin.family(monkeypatch, "gdn", SLOT):
        yield
    jax.clear_caches()


@pytest.mark.parametrize("pool", [True, False])
def test_the_state_is_the_given_ones_buffer(pool: bool, rng: np.random.Generator) -> None:
    tokens = [jnp.ones((2, 2, 4))] * 3 + [jnp.ones((2, 2))] * 2
    drawn = rng.standard_normal((5 if pool else 2, 2, 4, 4))
    more = {"state_indices": jnp.array([3, 1], jnp.int32)} if pool else {}
    step = jax.jit(lambda state, *tokens: cudnn_jax.gdn_step(*tokens, state, **more), donate_argnums=0)
    state = jnp.asarray(drawn, jnp.float32)
    where = state.unsafe_buffer_pointer()
    out, after = step(state, *tokens)
    assert not out.any()
    np.testing.assert_array_equal(after, drawn.astype(np.float32))
    assert after.unsafe_buffer_pointer() == where
    kept = jnp.asarray(drawn, jnp.float32)
    again = jax.jit(lambda state, *tokens: cudnn_jax.gdn_step(*tokens, state, **more))(kept, *tokens)[1]
    assert again.unsafe_buffer_pointer() != kept.unsafe_buffer_pointer()
    np.testing.assert_array_equal(again, kept)


def test_equal_lengths_are_an_operand_of_the_program() -> None:
    tokens = [jax.ShapeDtypeStruct((2, 8, 2, 4), jnp.float32)] * 3 + [jax.ShapeDtypeStruct((2, 8, 2), jnp.float32)] * 2
    text = jax.jit(lambda *x: cudnn_jax.gdn(*x)[0]).lower(*tokens).as_text()
    (call,) = [line for line in text.splitlines() if "custom_call @cudnn_jax.program" in line]
    assert "tensor<16x2x4xf32>" in call and "tensor<3xi32>" in call
    assert "dense<[0, 8, 16]> : tensor<3xi32>" in text
