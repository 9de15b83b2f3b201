"""An output that is an input's buffer, written over: which it is, and that the graph's hash tells it."""

from __future__ import annotations

import pytest

from cudnn_jax.graph import GraphValidationError, pygraph


def decode(overwrite: bool, kept: bool = True) -> pygraph:
    graph = pygraph(io_data_type="bfloat16")
    tokens = {name: graph.tensor((3, 2, 16)) for name in ("q", "k", "v")}
    gates = {name: graph.tensor((3, 2), data_type="float32") for name in ("g", "beta")}
    out, state, _ = graph.gdn(
        **tokens,
        **gates,
        cu_seqlens=graph.tensor((4,), data_type="int32"),
        initial_state=graph.tensor((5, 2, 16, 16), data_type="float32"),
        state_indices=graph.tensor((3,), data_type="int32"),
        output_final_state=True,
        overwrite_initial_state=overwrite,
    )
    for tensor in (out, state) if kept else (out,):
        tensor.set_output(True)
    return graph


def test_a_state_that_is_written_over_is_its_input() -> None:
    graph = decode(True)
    ((made, over),) = graph.in_place.items()
    (node,) = graph.nodes
    assert graph.outputs[made] is node.outputs["final_state"]
    assert graph.inputs[over] is node.inputs["initial_state"]
    assert graph.outputs[made].dim == graph.inputs[over].dim


def test_other_outputs_have_memory_of_their_own() -> None:
    assert decode(False).in_place == {}
    assert decode(False).hash() != decode(True).hash()


def test_what_is_written_over_is_an_output() -> None:
    decode(False, kept=False).validate()
    with pytest.raises(
        GraphValidationError, match="final_state is written over initial_state; the rule: final_state is"
    ):
        decode(True, kept=False).validate()
