"""The samples of attention with options: what they mean, and that their arrays are legal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_jax.engines import ids
from cudnn_jax.engines.target import CPU
from cudnn_jax.graph import Node
from cudnn_jax.graph.differentiation import Differentiable
from gpu.operation_once import error_of_rows
from support import operations
from support.attention import samples
from support.attention.harness import FORWARD_TOLERANCE
from support.attention.options import attend, within
from support.attention.oracle import distance


@pytest.mark.parametrize("name", operations.ATTENTION)
def test_every_sample_has_a_reference_and_keeps_its_meaning_as_text(name: str) -> None:
    graph = operations.graph_of(name)
    back = type(graph).from_json(graph.to_json())
    assert back.canonical_json() == graph.canonical_json()
    back.create_execution_plans(target=CPU)
    (plan,) = back.plans
    family = {"sdpa": "sdpa_fwd", "sdpa_backward": "sdpa_bwd"}[name.split()[0]]
    assert plan.engine_id == ids.engine_id(family, ids.REFERENCE_SLOT)


def layout(node: Node) -> dict[str, Any]:
    """Port -> what is told of a buffer."""
    tensors = {**node.inputs, **node.outputs}
    return {
        port: (x.dim, x.stride, x.data_type, x.ragged_offset is not None)
        for port, x in tensors.items()
        if not x.is_virtual
    }


@pytest.mark.parametrize(
    "option", ["packed", "packed stats", "packed with gaps", "packed keys", "packed causal", "dSink_token", "alibi"]
)
def test_the_backward_is_what_the_gradient_of_the_forward_asks_for(option: str) -> None:
    forward = operations.graph_of(f"sdpa {'sink' if option == 'dSink_token' else option}")
    moving = [at for at, tensor in enumerate(forward.inputs) if tensor.data_type.is_floating]
    o = next(at for at, tensor in enumerate(forward.outputs) if tensor.dim[3] == samples.D)
    asked = Differentiable(forward, moving).backward([o]).graph
    asked.freeze()
    (node,), (wanted,) = asked.nodes, operations.graph_of(f"sdpa_backward {option}").nodes
    assert node.type == wanted.type == "SDPA_BACKWARD"
    assert layout(node) == layout(wanted)
    assert {k: v for k, v in node.params.items() if v} == {k: v for k, v in wanted.params.items() if v}


def test_packed_arrays_hold_sequences_noise_and_what_the_forward_makes() -> None:
    graph = operations.graph_of("sdpa_backward packed stats with gaps")
    arrays = operations.arrays_of(graph, np.random.default_rng())
    given = {tensor.name: array for tensor, array in zip(graph.inputs, arrays, strict=True)}

    def padded(name: str, side: str) -> np.ndarray[Any, Any]:
        array = given[name].astype(np.float64)
        b, n, t, d = array.shape
        memory = array.swapaxes(1, 2).reshape(b * t, n, d)
        lengths, starts = samples.APART[side]
        np.testing.assert_array_equal(
            given[f"starts of {name if name == 'stats' else side}"].ravel(), np.array(starts) * n * d
        )
        made = np.zeros((b, t, n, d))
        for at, (length, start) in enumerate(zip(lengths, starts, strict=False)):
            made[at, :length] = memory[start : start + length]
            memory[start : start + length] = np.nan
        outside = memory[~np.isnan(memory)]
        assert outside.size
        blank = {"o": 0, "stats": -np.inf}
        assert (outside == blank[name]).all() if name in blank else np.abs(outside).max() > samples.NOISE
        return made.swapaxes(1, 2)

    q, k, v, o, _, stats = (padded(x, "kv" if x in "kv" else "q") for x in samples.NEEDED[True])
    rows = within(np.array(samples.APART["q"].lengths), samples.T)[:, None, :, None]
    keys = within(np.array(samples.APART["kv"].lengths), samples.S)[:, None, None, :]
    want = attend(q, k, v, scale=samples.SCALE, keep=keys, rows=rows)
    assert distance(o, want["O"]) <= FORWARD_TOLERANCE["bfloat16"]
    assert distance(np.where(rows, stats, 0), np.where(rows, want["Stats"], 0)) <= FORWARD_TOLERANCE["bfloat16"]


def test_the_error_of_rows_is_infinite_where_nothing_is_attended_to() -> None:
    right = np.array([[1.0, 2.0], [0.0, 0.0]])
    assert error_of_rows(right * 1.5, right, exact=True) == 0.5
    assert error_of_rows(np.maximum(right, 1e-6), right, exact=True) == np.inf
    assert error_of_rows(np.maximum(right, 1e-6), right, exact=False) < 1e-6
    assert not error_of_rows(np.where(right == 2, np.nan, right), right, exact=False) <= 1
    stats = np.array([[3.0], [-np.inf]])
    assert error_of_rows(stats, stats, exact=True) == 0
    for made in ([[3.0], [-1e30]], [[-np.inf], [-np.inf]]):
        assert error_of_rows(made, stats, exact=False) == np.inf
