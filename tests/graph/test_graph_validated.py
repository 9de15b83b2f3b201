"""What `validate` found holds until a change, on every public way to make one; and what a Python-only graph gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from graph_samples import masked_attention

from cudnn_jax.graph import OPERATIONS, GraphValidationError, Tensor, data_type, pygraph

T, H, D = 16, 2, 8


def delta_net(*, asked: bool = False) -> pygraph:
    """Gated DeltaNet: a node that engines of Python alone run."""
    graph = pygraph(io_data_type="bfloat16", intermediate_data_type="float32")
    q, k, v = (graph.tensor((T, H, D), name=name) for name in "qkv")
    g, beta = (graph.tensor((T, H), data_type="float32", name=name) for name in ("g", "beta"))
    starts = graph.tensor((3,), data_type="int32")
    for tensor in graph.gdn(q, k, v, g, beta, cu_seqlens=starts, output_final_state=True):
        if tensor is not None:
            tensor.set_output(asked)
    return graph


SETTERS = sorted(name for name in dir(Tensor) if name.startswith("set_"))
WRITTEN = sorted(name for name, kind in vars(Tensor).items() if isinstance(kind, property) and kind.fset)


def _by_setter(name: str) -> Callable[[pygraph], Any]:
    def change(graph: pygraph) -> Any:
        tensor = graph.tensors[0]
        current = True if name == "set_output" else getattr(tensor, name.removeprefix("set_"))
        return getattr(tensor, name)(current)

    return change


def _by_attribute(name: str) -> Callable[[pygraph], Any]:
    return lambda graph: setattr(graph.tensors[0], name, getattr(graph.tensors[0], name))


def _by_graph(name: str) -> Callable[[pygraph], Any]:
    return lambda graph: setattr(graph, name, getattr(graph, name))


MUTATIONS: dict[str, Callable[[pygraph], Any]] = {
    **{f"tensor.{name}()": _by_setter(name) for name in SETTERS},
    **{f"tensor.{name} =": _by_attribute(name) for name in WRITTEN},
    **{
        f"graph.{name} =": _by_graph(name)
        for name in ("name", "io_data_type", "intermediate_data_type", "compute_data_type")
    },
    "node.name =": lambda graph: setattr(graph.nodes[0], "name", "mine"),
    "graph.attribute =": lambda graph: setattr(graph, "mine", 1),
    "tensor()": lambda graph: graph.tensor((2,)),
    "tensor_like()": lambda graph: graph.tensor_like(graph.tensors[0]),
    "scalar()": lambda graph: graph.scalar(1.0, "float32"),
    "a builder": lambda graph: graph.exp(graph.tensors[0]),
}


def test_the_list_of_mutations_is_whole() -> None:
    assert {"set_dim", "set_output", "set_uid"} < set(SETTERS)
    assert set(WRITTEN) == {setter.removeprefix("set_") for setter in SETTERS} - {"output"} | {"value"}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_change_undoes_what_was_found(mutation: str) -> None:
    graph = delta_net()
    assert not graph.validated
    graph.validate()
    assert graph.validated and not graph.frozen
    MUTATIONS[mutation](graph)
    assert not graph.validated
    graph.validate()
    assert graph.validated


def test_reading_undoes_nothing() -> None:
    graph = delta_net()
    graph.validate()
    for read in (graph.canonical_json, graph.hash, graph.inspect, graph.draw, graph.to_json, lambda: repr(graph)):
        read()
    assert graph.validated


def test_a_rule_that_breaks_after_validation_is_found_again() -> None:
    graph = delta_net()
    graph.validate()
    graph.tensors[3].dim = (T + 1, H)
    with pytest.raises(GraphValidationError, match="gdn: g has dim"):
        graph.freeze()
    assert not graph.frozen


def test_which_operations_python_alone_runs() -> None:
    names = {name for name, operation in OPERATIONS.items() if operation.python_only}
    assert names == {"gdn", "gdn_bwd", "kda", "kda_bwd", "gdn2", "gdn2_bwd"}
    assert delta_net().python_only and not masked_attention().python_only


def test_virtual_hides_no_operand_of_a_python_only_graph() -> None:
    """Its hash is that of the graph whose outputs were asked for, types and all."""
    graph = delta_net()
    assert all(tensor.is_virtual and not tensor.is_inside for tensor in graph.nodes[0].outputs.values())
    assert graph.outputs == list(graph.nodes[0].outputs.values())
    assert graph.outputs[0].data_type is data_type.BFLOAT16
    assert graph.hash() == delta_net(asked=True).hash()


def test_what_another_node_reads_stays_inside() -> None:
    graph = delta_net()
    out = graph.nodes[0].outputs["O"]
    folded = graph.exp(out)
    assert out.is_inside and not folded.is_inside
    assert graph.outputs == [graph.nodes[0].outputs["final_state"], folded]


def test_what_is_asked_for_is_all_that_is_given() -> None:
    graph = delta_net()
    out, state = graph.nodes[0].outputs.values()
    state.set_output(True)
    assert graph.outputs == [state] and out.is_inside
    state.set_output(False)
    assert graph.outputs == [out, state]


def test_elsewhere_virtual_means_inside() -> None:
    graph = masked_attention()
    out, stats = graph.outputs
    stats.set_output(False)
    assert stats.is_inside and graph.outputs == [out]
