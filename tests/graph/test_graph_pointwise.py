"""Pointwise operations and matmul: dims, strides, attributes, types."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_jax.graph import OPERATIONS, GraphValidationError, data_type, pygraph

POINTWISE = [op for op in OPERATIONS.values() if op.type == "POINTWISE"]


def attributes(operation):
    return {a.name: 1 for a in operation.attributes if a.required}


@pytest.mark.parametrize("operation", POINTWISE, ids=lambda op: op.name)
def test_every_operation_makes_a_node(operation) -> None:
    graph = pygraph(io_data_type="float16")
    ports = {port.name: graph.tensor((2, 3, 4)) for port in operation.inputs}
    out = getattr(graph, operation.name)(**ports, **attributes(operation), name="it")
    (node,) = graph.nodes
    assert (node.type, node.params["mode"], node.name) == ("POINTWISE", operation.name, "it")
    assert list(node.inputs.items()) == list(ports.items())
    assert node.outputs == {"OUT_0": out} and out.producer is node
    assert (out.dim, out.stride, out.is_virtual) == ((2, 3, 4), (12, 4, 1), True)
    assert out.data_type is data_type.FLOAT
    out.set_output(True)
    assert out.data_type is data_type.HALF
    graph.validate()


def test_positional_arguments_follow_the_ports() -> None:
    graph = pygraph(io_data_type="float32")
    a, b = graph.tensor((2, 2)), graph.tensor((2, 2))
    graph.sub(a, b)
    assert graph.nodes[0].inputs == {"a": a, "b": b}


dims = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@settings(deadline=None)
@given(dims, st.data())
def test_inputs_broadcast_as_numpy_does(full, data) -> None:
    np = pytest.importorskip("numpy")
    rank = data.draw(st.integers(1, len(full)))
    shrunk = [data.draw(st.sampled_from([1, size])) for size in full[-rank:]]
    graph = pygraph(io_data_type="float32")
    out = graph.add(graph.tensor(full), graph.tensor(shrunk))
    model = np.empty(np.broadcast_shapes(full, shrunk), np.int8)
    assert out.dim == model.shape
    if model.size:
        assert out.stride == tuple(np.cumprod([1, *model.shape[:0:-1]])[::-1])


def test_what_does_not_broadcast_is_refused_with_both_dims() -> None:
    graph = pygraph(io_data_type="float32")
    with pytest.raises(
        GraphValidationError, match=r"add 'sum': dims are a \(2, 3\), b \(2, 4\); the rule: .*broadcast"
    ):
        graph.add(graph.tensor((2, 3)), graph.tensor((2, 4)), name="sum")
    assert graph.nodes == ()


def test_a_number_takes_the_rank_of_its_neighbours() -> None:
    graph = pygraph(io_data_type="float32")
    assert graph.mul(graph.tensor((5, 6)), graph.scalar(2.0)).dim == (5, 6)
    assert graph.mul(graph.scalar(3.0), graph.scalar(2.0)).dim == (1, 1, 1, 1)


def test_attributes_are_kept_as_plain_values() -> None:
    graph = pygraph(io_data_type="float32")
    x = graph.tensor((2, 3))
    graph.relu(x, lower_clip=0, upper_clip=6)
    graph.gen_index(x, 1)
    graph.swish(x)
    clipped, index, swish = (dict(node.params) for node in graph.nodes)
    assert clipped == {"mode": "relu", "negative_slope": None, "lower_clip": 0.0, "upper_clip": 6.0}
    assert isinstance(clipped["upper_clip"], float)
    assert index == {"mode": "gen_index", "axis": 1}
    assert swish == {"mode": "swish", "swish_beta": None}


@pytest.mark.parametrize(
    ("name", "keywords", "message"),
    [
        ("gen_index", {}, r"gen_index: axis is missing; the rule: an integer"),
        ("gen_index", {"axis": 2}, r"gen_index: axis is 2; the rule: an axis of input, 0 to 1"),
        ("gen_index", {"axis": -1}, r"axis is -1"),
        ("gen_index", {"axis": 1.0}, r"axis is 1.0; the rule: an integer"),
        ("gen_index", {"axis": True}, r"axis is True; the rule: an integer"),
        ("leaky_relu", {}, r"leaky_relu: negative_slope is missing; the rule: a number"),
        ("gen_index", {"axis": 2**63}, r"axis is 9223372036854775808; the rule: an integer that int64 holds"),
        ("leaky_relu", {"negative_slope": 10**400}, r"negative_slope is an integer of 1329 bits; .* float64 holds"),
        ("relu", {"upper_clip": "6"}, r"relu: upper_clip is '6'; the rule: a number"),
        ("relu", {"compute_data_type": "f32"}, r"relu: 'f32' is not a data type"),
    ],
)
def test_a_bad_attribute_is_refused_by_name(name, keywords, message) -> None:
    graph = pygraph(io_data_type="float32")
    with pytest.raises(GraphValidationError, match=message):
        getattr(graph, name)(graph.tensor((2, 3)), **keywords)


def test_compute_type_is_the_nodes_own() -> None:
    graph = pygraph(io_data_type="float32")
    graph.exp(graph.tensor((2,)), compute_data_type="bfloat16")
    graph.exp(graph.tensor((2,)))
    assert [node.compute_data_type for node in graph.nodes] == [data_type.BFLOAT16, data_type.NOT_SET]


# matmul


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [((3, 4), (4, 5), (3, 5)), ((7, 3, 4), (1, 4, 5), (7, 3, 5)), ((2, 1, 3, 0), (6, 0, 5), (2, 6, 3, 5))],
)
def test_matmul_infers_its_dims(a, b, c) -> None:
    graph = pygraph(io_data_type="bfloat16")
    out = graph.matmul(graph.tensor(a), graph.tensor(b), "product").set_output(True)
    assert out.dim == c and out.stride[-2:] == (c[-1], 1)
    (node,) = graph.nodes
    assert (node.type, node.name, list(node.inputs), list(node.outputs)) == ("MATMUL", "product", ["A", "B"], ["C"])
    graph.validate()


@pytest.mark.parametrize(("a", "b"), [((3, 4), (5, 6)), ((4,), (4, 5)), ((2, 3, 4), (3, 4, 5))])
def test_matmul_refuses_dims_that_do_not_chain(a, b) -> None:
    graph = pygraph(io_data_type="bfloat16")
    with pytest.raises(GraphValidationError, match=r"matmul: dims are A .*; the rule: A \(\.\.\., M, K\)"):
        graph.matmul(A=graph.tensor(a), B=graph.tensor(b))
