"""After the freeze every public way to change a graph raises, and every way to read it works."""

from __future__ import annotations

import inspect

import pytest
from graph_samples import masked_attention

from cudnn_jax.graph import OPERATIONS, GraphFrozenError, GraphValidationError, Node, Tensor, pygraph


@pytest.fixture
def frozen() -> pygraph:
    graph = masked_attention()
    graph.freeze()
    return graph


def public(kind: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(kind) if not name.startswith("_")]


SETTERS = [name for name in public(Tensor) if name.startswith("set_")]
GETTERS = [name for name in public(Tensor) if name.startswith("get_")]
TENSOR_ATTRIBUTES = [name for name in public(Tensor) if isinstance(getattr(Tensor, name), property)]
NODE_ATTRIBUTES = [name for name in public(Node) if isinstance(getattr(Node, name), property)]


def test_the_lists_of_this_file_are_not_empty() -> None:
    assert {"set_uid", "set_output", "set_dim", "set_stride"} < set(SETTERS)
    assert {"uid", "dim", "stride", "value", "ragged_offset"} < set(TENSOR_ATTRIBUTES)
    assert {"inputs", "outputs", "params", "name"} < set(NODE_ATTRIBUTES)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_every_builder_is_closed(frozen, operation) -> None:
    before = frozen.canonical_json()
    ports = {port.name: frozen.tensors[0] for port in operation.inputs if not port.optional}
    attributes = {a.name: 1 for a in operation.attributes if a.required}
    with pytest.raises(GraphFrozenError, match=f"{operation.name} cannot be added; the graph is frozen"):
        getattr(frozen, operation.name)(**ports, **attributes)
    assert frozen.canonical_json() == before


@pytest.mark.parametrize(
    "make",
    [
        lambda graph: graph.tensor((2,)),
        lambda graph: graph.scalar(1.0, "float32"),
        lambda graph: graph.tensor_like(graph.tensors[0]),
    ],
)
def test_every_way_to_make_a_tensor_is_closed(frozen, make) -> None:
    count = len(frozen.tensors)
    with pytest.raises(GraphFrozenError):
        make(frozen)
    assert len(frozen.tensors) == count


@pytest.mark.parametrize("setter", SETTERS)
def test_every_fluent_setter_is_closed(frozen, setter) -> None:
    for tensor in frozen.tensors:
        current = getattr(tensor, setter.replace("set_", "get_", 1).replace("output", "is_virtual"))()
        with pytest.raises(GraphFrozenError, match="cannot change; the graph is frozen"):
            getattr(tensor, setter)(current)


@pytest.mark.parametrize("attribute", TENSOR_ATTRIBUTES)
def test_every_attribute_of_a_tensor_is_closed(frozen, attribute) -> None:
    for tensor in frozen.tensors:
        current = getattr(tensor, attribute)
        with pytest.raises((GraphFrozenError, AttributeError)):
            setattr(tensor, attribute, current)
        with pytest.raises(AttributeError):
            delattr(tensor, attribute)


@pytest.mark.parametrize("attribute", NODE_ATTRIBUTES)
def test_every_attribute_of_a_node_is_closed(frozen, attribute) -> None:
    for node in frozen.nodes:
        with pytest.raises((GraphFrozenError, AttributeError)):
            setattr(node, attribute, getattr(node, attribute))
        with pytest.raises(AttributeError):
            delattr(node, attribute)


@pytest.mark.parametrize(
    "attribute",
    ["name", "io_data_type", "intermediate_data_type", "compute_data_type", "frozen", "nodes", "inputs", "mine"],
)
def test_every_attribute_of_the_graph_is_closed(frozen, attribute) -> None:
    with pytest.raises(GraphFrozenError, match=f"{attribute} cannot change"):
        setattr(frozen, attribute, "float16")
    with pytest.raises(GraphFrozenError, match=f"{attribute} cannot go"):
        delattr(frozen, attribute)


@pytest.mark.parametrize("freeze", [False, True])
def test_ports_and_parameters_are_views(freeze) -> None:
    graph = masked_attention()
    if freeze:
        graph.freeze()
    node = graph.nodes[-1]
    for view in (node.inputs, node.outputs, node.params):
        key = next(iter(view))
        with pytest.raises(TypeError):
            view[key] = view[key]
        with pytest.raises(TypeError):
            del view[key]
        with pytest.raises(AttributeError):
            view.clear()


def test_dims_strides_nodes_and_tensors_are_tuples(frozen) -> None:
    for sealed in (frozen.nodes, frozen.tensors, *(t.dim for t in frozen.tensors), *(t.stride for t in frozen.tensors)):
        assert type(sealed) is tuple


def test_what_readers_are_handed_is_their_own(frozen) -> None:
    before = frozen.canonical_json()
    frozen.inputs.clear()
    frozen.outputs.clear()
    frozen.canonical()["nodes"].clear()
    frozen.tensors[0].get_dim().clear()
    assert len(frozen.inputs) == 4 and len(frozen.outputs) == 2
    assert frozen.canonical_json() == before == masked_attention().canonical_json()


@pytest.mark.parametrize("getter", GETTERS)
def test_every_getter_still_reads(frozen, getter) -> None:
    for tensor in frozen.tensors:
        read = getattr(tensor, getter)()
        current = getattr(tensor, getter.removeprefix("get_"))
        assert read == (list(current) if isinstance(current, tuple) else current)


def test_freezing_twice_is_freezing_once(frozen) -> None:
    frozen.freeze()
    frozen.validate()
    assert frozen.frozen


def test_a_graph_that_breaks_a_rule_stays_open() -> None:
    graph = masked_attention()
    graph.tensors[0].dim = (2, 3)
    with pytest.raises(GraphValidationError):
        graph.freeze()
    assert not graph.frozen
    graph.tensors[0].dim = (2, 4, 8, 32)
    graph.freeze()


def test_an_open_graph_can_change() -> None:
    graph = masked_attention()
    graph.note = "mine"
    del graph.note
    assert not hasattr(graph, "note")
    graph.name = "mine"
    graph.io_data_type = "float16"
    graph.nodes[-1].name = "attend"
    out = graph.outputs[0]
    out.name, out.uid, out.data_type = "out", 100, "float32"
    assert (graph.io_data_type.value, out.uid, out.data_type.value) == ("float16", 100, "float32")
    graph.freeze()
