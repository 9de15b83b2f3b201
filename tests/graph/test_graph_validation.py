"""The rules that hold for any graph, and the words in which they are said."""

from __future__ import annotations

from fractions import Fraction

import pytest
from graph_samples import B, qkv

from cudnn_jax.graph import GraphValidationError, data_type, pygraph


@pytest.fixture
def graph() -> pygraph:
    return pygraph(io_data_type="float32")


def test_the_error_is_a_value_error() -> None:
    assert issubclass(GraphValidationError, ValueError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": ()}, r"tensor 'x': dim is \(\); the rule: a sequence of at least one integer, none negative"),
        ({"dim": (2, -1)}, r"tensor 'x': dim is \(2, -1\)"),
        ({"dim": (2, 1.5)}, r"tensor 'x': dim is \(2, 1.5\)"),
        ({"dim": 4}, r"tensor 'x': dim is 4"),
        ({"dim": "22"}, r"tensor 'x': dim is '22'"),
        ({"dim": (2, 2**63)}, r"tensor 'x': dim is \(2, 9223372036854775808\); the rule: integers below 2\*\*63"),
        ({"dim": (2,), "stride": (10**5000,)}, r"stride is \(an integer of 16610 bits\); the rule: integers below"),
        ({"dim": (1,), "value": Fraction(10**400)}, r"tensor 'x': value is Fraction\(10*\.\.\.; the rule: one number$"),
        ({"dim": (2, 3), "stride": (1,)}, r"stride is \(1,\) and dim is \(2, 3\); the rule: one stride for each dim"),
        ({"dim": (2,), "stride": (-1,)}, r"stride is \(-1,\)"),
        ({"dim": (2,), "data_type": "float31"}, r"tensor 'x': 'float31' is not a data type; the rule: one of float32"),
        ({"dim": (1,), "value": "one"}, r"tensor 'x': value is 'one'; the rule: one number"),
        ({"dim": (1,), "ragged_offset": (0, 1)}, r"tensor 'x': ragged_offset is \(0, 1\); the rule: a tensor of the"),
    ],
)
def test_a_bad_tensor_is_refused_by_name(graph, arguments, message) -> None:
    with pytest.raises(GraphValidationError, match=message):
        graph.tensor(**arguments, name="x")


def test_a_name_is_a_string(graph) -> None:
    x = graph.tensor((2, 3), name=None)
    assert x.name == ""
    y = graph.exp(x, name="e")
    for owner, name in (
        ("graph", lambda: setattr(graph, "name", 7)),
        ("tensor", lambda: graph.tensor((2,), name=7)),
        ("tensor #1", lambda: x.set_name(7)),
        ("exp", lambda: graph.exp(x, name=7)),
        ("exp 'e'", lambda: setattr(y.producer, "name", 7)),
    ):
        with pytest.raises(GraphValidationError, match=f"^{owner}: name is 7; the rule: a string$"):
            name()


def test_a_tensor_without_a_name_is_called_by_its_uid(graph) -> None:
    with pytest.raises(GraphValidationError, match=r"tensor #7: dim is \(\)"):
        graph.tensor((2,), uid=7).set_dim(())


def test_setters_hold_the_same_rules(graph) -> None:
    x = graph.tensor((2, 3), name="x")
    for attribute, wrong in (("dim", (-1,)), ("stride", "ab"), ("data_type", 3), ("value", [1]), ("uid", -2)):
        with pytest.raises(GraphValidationError):
            setattr(x, attribute, wrong)
    assert (x.dim, x.stride, x.uid) == ((2, 3), (3, 1), 1)


def test_sequences_of_any_library_are_dims(graph) -> None:
    class Size(tuple):
        pass

    class Integer:
        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            return self.value

    x = graph.tensor(Size((2, 3)), [Integer(3), 1])
    assert x.dim == (2, 3) and type(x.dim) is tuple and x.stride == (3, 1)
    assert all(type(size) is int for size in (*x.dim, *x.stride))
    assert graph.tensor(range(3)).dim == (0, 1, 2)


def test_strides_are_row_major_unless_given(graph) -> None:
    assert graph.tensor((2, 3, 4)).stride == (12, 4, 1)
    assert graph.tensor((2, 0, 4)).stride == (0, 4, 1)
    assert graph.tensor((2, 3), (1, 2)).stride == (1, 2)


def test_a_data_type_is_explicit_or_the_graphs() -> None:
    graph = pygraph()
    x = graph.tensor((2,), name="x")
    out = graph.exp(x, name="e").set_output(True)
    with pytest.raises(GraphValidationError, match=r"exp 'e': input \('x'\) has no data type; .*io_data_type"):
        graph.validate()
    x.set_data_type("float16")
    with pytest.raises(GraphValidationError, match=r"exp 'e': OUT_0 \('e::OUT_0'\) has no data type"):
        graph.validate()
    out.set_data_type(data_type.HALF)
    graph.validate()
    graph.intermediate_data_type = None
    graph.exp(graph.exp(x)).set_output(True).set_data_type("float16")
    with pytest.raises(GraphValidationError, match=r"intermediate_data_type"):
        graph.validate()


@pytest.mark.parametrize("option", ["io_data_type", "intermediate_data_type", "compute_data_type"])
def test_a_bad_default_type_is_refused_by_name(option) -> None:
    with pytest.raises(GraphValidationError, match=rf"{option}: 'f4' is not a data type"):
        pygraph(**{option: "f4"})


def test_a_tensor_of_another_graph_is_refused(graph) -> None:
    other = pygraph(io_data_type="float32").tensor((2,), name="theirs")
    with pytest.raises(GraphValidationError, match=r"add: b is <Tensor %theirs.*; the rule: a tensor of this graph"):
        graph.add(graph.tensor((2,)), other)
    with pytest.raises(GraphValidationError, match=r"ragged_offset is .*; the rule: a tensor of the same graph"):
        graph.tensor((2,), ragged_offset=other)
    with pytest.raises(GraphValidationError, match=r"dBias is .*; the rule: a tensor of this graph"):
        ports = {name: graph.tensor((1, 1, 1, 1)) for name in ("q", "k", "v", "o", "dO", "stats", "bias")}
        graph.sdpa_backward(**ports, dBias=other)
    assert graph.nodes == ()


def test_a_missing_port_is_named(graph) -> None:
    with pytest.raises(GraphValidationError, match=r"add: b is missing; the rule: a tensor"):
        graph.add(graph.tensor((2,)))
    ports = qkv(graph) | {"v": None}
    with pytest.raises(GraphValidationError, match=r"sdpa 'attend': v is missing"):
        graph.sdpa(**ports, name="attend")


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (1, {"biass": 1}, "neg: unknown keyword 'biass'; the rule: one of"),
        (1, {"input": 1}, "neg: input came twice, by position and by keyword"),
        (4, {}, "neg: 4 positional arguments; the rule: at most 3"),
    ],
)
def test_a_call_that_does_not_fit_the_signature(graph, args, kwargs, message) -> None:
    x = graph.tensor((2,))
    with pytest.raises(GraphValidationError, match=message):
        graph.neg(*[x] * args, **kwargs)


def test_what_is_no_tensor_is_refused(graph) -> None:
    with pytest.raises(GraphValidationError, match=r"add: b is 2\.0; the rule: a tensor of this graph"):
        graph.add(graph.tensor((2,)), 2.0)
    with pytest.raises(GraphValidationError, match=r"tensor_like: \(2,\) came"):
        graph.tensor_like((2,))


def test_a_graph_computes_something_that_leaves_it(graph) -> None:
    with pytest.raises(GraphValidationError, match=r"has no operation"):
        graph.validate()
    out = graph.neg(graph.tensor((2,)))
    with pytest.raises(GraphValidationError, match=r"gives nothing; the rule: .*set_output\(True\)"):
        graph.validate()
    for read in (graph.canonical, graph.canonical_json, graph.hash, graph.freeze):
        with pytest.raises(GraphValidationError, match="gives nothing"):
            read()
    out.set_output(True)
    graph.validate()


def test_a_virtual_tensor_is_made_by_a_node(graph) -> None:
    x = graph.tensor((2,), name="x", is_virtual=True)
    graph.neg(x).set_output(True)
    with pytest.raises(GraphValidationError, match=r"neg: input is the virtual 'x'; the rule: .* made by a node"):
        graph.validate()


def test_an_output_keeps_the_dims_of_its_operation(graph) -> None:
    out = graph.neg(graph.tensor((2, 3))).set_output(True).set_dim((3, 2))
    with pytest.raises(GraphValidationError, match=r"OUT_0 was set to dim \(3, 2\); .* makes \(2, 3\)"):
        graph.validate()
    out.set_dim([2, 3]).set_stride([1, 2])
    graph.validate()
    assert (out.dim, out.stride) == ((2, 3), (1, 2))
    out.set_stride((1,))
    with pytest.raises(GraphValidationError, match=r"has dim \(2, 3\) and stride \(1,\); the rule: one stride"):
        graph.validate()


def test_inference_follows_a_change_of_the_inputs(graph) -> None:
    x = graph.tensor((2, 3))
    y = graph.neg(graph.exp(x)).set_output(True)
    x.dim = (4, 5)
    assert (y.dim, y.stride, x.stride) == ((4, 5), (5, 1), (5, 1))


def test_inference_follows_a_change_of_the_strides(graph) -> None:
    ports = qkv(graph)
    out, _ = graph.sdpa(**ports)
    before = out.stride
    ports["q"].stride = (4 * 8 * 32, 8 * 32, 32, 1)
    assert out.stride == (4 * 8 * 24, 8 * 24, 24, 1) != before


def test_a_change_that_breaks_a_rule_is_said_by_validate(graph) -> None:
    a, b = graph.tensor((2, 3)), graph.tensor((2, 3))
    graph.add(a, b).set_output(True)
    a.dim = (2, 4)
    with pytest.raises(GraphValidationError, match=r"add: dims are"):
        graph.validate()
    b.dim = (2, 4)
    graph.validate()
    assert graph.outputs[0].dim == (2, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.set_dim((2,)), r"b is by value with value 1.0, dim \(2,\); the rule: one number, dims all 1"),
        (lambda s: setattr(s, "value", None), r"b is by value with value None"),
        (lambda s: s.set_is_pass_by_value(False), r"b has value 1.0; the rule: only a tensor passed by value has one"),
        (lambda s: s.set_is_virtual(True), r"b is the number .*; the rule: a number is neither virtual nor made"),
        (lambda s: s.set_data_type("uint8") and setattr(s, "value", -1), r"value -1; the rule: an integer that uint8"),
        (lambda s: s.set_data_type("int8") and setattr(s, "value", 128), r"value 128; .* int8 holds"),
        (lambda s: s.set_data_type("int32") and setattr(s, "value", 0.5), r"value 0.5; .* int32 holds"),
        (lambda s: s.set_data_type("int64") and setattr(s, "value", float("inf")), r"value inf; .* int64 holds"),
        (
            lambda s: setattr(s, "value", 10**400),
            r"value an integer of 1329 bits; the rule: a number that float64 holds",
        ),
        (lambda s: s.set_data_type("bool") and setattr(s, "value", 2), r"value 2; .* bool holds"),
    ],
)
def test_a_number_is_one_number_that_its_type_holds(graph, change, message) -> None:
    scalar = graph.scalar(1.0)
    graph.add(graph.tensor((2,)), scalar).set_output(True)
    graph.validate()
    change(scalar)
    with pytest.raises(GraphValidationError, match=message):
        graph.validate()


def test_a_tensor_by_value_needs_its_value(graph) -> None:
    graph.neg(graph.tensor((1,), is_pass_by_value=True)).set_output(True)
    with pytest.raises(GraphValidationError, match=r"input is by value with value None"):
        graph.validate()


def test_numbers_of_any_library_are_numbers(graph) -> None:
    np = pytest.importorskip("numpy")
    values = [graph.scalar(np.float32(0.5)).value, graph.scalar(np.int64(3)).value, graph.scalar(True).value]
    assert values == [0.5, 3, True] and [type(value) for value in values] == [float, int, bool]


def test_an_output_is_no_number(graph) -> None:
    out = graph.neg(graph.tensor((1,))).set_output(True).set_is_pass_by_value(True)
    out.value = 1.0
    with pytest.raises(GraphValidationError, match=r"neg: OUT_0 is the number"):
        graph.validate()


@pytest.mark.parametrize(
    ("dim", "kind", "message"),
    [
        ((B, 1, 1, 1), "int32", r"q has a ragged_offset of dim \(2, 1, 1, 1\); the rule: \(B \+ 1, 1, ...\) = \(3, 1"),
        ((B + 1,), "int32", r"ragged_offset of dim \(3,\)"),
        ((B + 1, 1, 1, 1), "float32", r"ragged_offset of type float32; the rule: int32 or int64"),
    ],
)
def test_a_ragged_offset_has_one_start_a_sequence_and_an_end(graph, dim, kind, message) -> None:
    ports = qkv(graph)
    graph.sdpa(**ports)[0].set_output(True)
    ports["q"].set_ragged_offset(graph.tensor(dim, data_type=kind))
    with pytest.raises(GraphValidationError, match=message):
        graph.validate()


def test_a_ragged_offset_comes_from_the_caller(graph) -> None:
    ports = qkv(graph)
    graph.sdpa(**ports)[0].set_output(True)
    ports["q"].ragged_offset = graph.tensor((B + 1, 1, 1, 1), data_type="int32", is_virtual=True)
    with pytest.raises(GraphValidationError, match=r"the rule: a plain tensor that the caller gives"):
        graph.validate()
    offset = graph.tensor((B + 1, 1, 1, 1), data_type="int32")
    ports["q"].ragged_offset = offset.set_ragged_offset(graph.tensor((B + 2, 1, 1, 1), data_type="int32"))
    with pytest.raises(GraphValidationError, match=r"the rule: a plain tensor that the caller gives"):
        graph.validate()
    ports["q"].ragged_offset = None
    graph.validate()


def test_tensor_like_copies_the_layout_and_the_type(graph) -> None:
    model = graph.tensor((2, 3), (1, 2), "int8", name="model", uid=5)
    copy = graph.tensor_like(model, "copy")
    assert (copy.dim, copy.stride, copy.data_type, copy.name) == ((2, 3), (1, 2), data_type.INT8, "copy")
    assert copy is not model and copy.uid != 5
