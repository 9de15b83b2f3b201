"""The reference pointwise engine against float64 formulas: every mode, types, conversions, broadcasting."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import CPU
from cudnn_jax.graph import GraphNotSupportedError
from support.pointwise import CASES, FORWARD, MODES, draw, expected


def evaluate(graph: pygraph, *arrays: Any) -> tuple[np.ndarray, ...]:
    graph.create_execution_plans(target=CPU)
    plan, artifact = graph.build_plans()
    assert plan.name == "xla"
    made = jax.jit(artifact.fn)(*arrays)
    for array, tensor in zip(made, graph.outputs, strict=True):
        assert (array.shape, array.dtype.name) == (tensor.dim, tensor.data_type.value)
    return tuple(np.asarray(array) for array in made)


def one(mode: str, arrays: list[Any], options: dict[str, Any] | None = None, out: Any = None, **graph: Any) -> Any:
    """A graph of one node, evaluated; pass numbers for tensors by value."""
    made = pygraph(**{"io_data_type": "float32"} | graph)
    tensors = [
        made.tensor(array.shape, data_type=array.dtype) if isinstance(array, np.ndarray) else made.scalar(array)
        for array in arrays
    ]
    result = getattr(made, mode)(*tensors, **options or {}).set_output(True)
    if out is not None:
        result.set_data_type(out)
    return evaluate(made, *[array for array in arrays if isinstance(array, np.ndarray)])[0]


def test_the_oracle_has_every_mode() -> None:
    assert len(MODES) == 54
    assert {mode.removesuffix("_backward") for mode in MODES} == set(FORWARD)


@pytest.mark.parametrize("mode, options", CASES, ids=lambda value: value if isinstance(value, str) else str(len(value)))
def test_every_mode_is_its_formula(mode: str, options: dict[str, Any], rng: np.random.Generator) -> None:
    arrays = draw(mode, rng)
    got, want = one(mode, arrays, options), expected(mode, arrays, options)
    np.testing.assert_allclose(got, np.asarray(want, np.float64), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("mode", ["gelu", "gelu_approx_tanh", "softplus", "sigmoid", "swish"])
def test_tails_keep_their_digits(mode: str) -> None:
    x = np.linspace(-9, -2, 64, dtype=np.float32)
    if mode == "gelu":
        from math import erfc

        want = np.array([0.5 * v * erfc(-v / 2**0.5) for v in x.astype(np.float64)])
    elif mode == "gelu_approx_tanh":
        wide = x.astype(np.float64)
        want = wide / (1 + np.exp(-2 * (2 / np.pi) ** 0.5 * (wide + 0.044715 * wide**3)))
    else:
        want = expected(mode, [x], {})
    np.testing.assert_allclose(one(mode, [x]), want, rtol=2e-5, atol=0)


@pytest.mark.parametrize("mode", ["elu", "softplus", "sigmoid", "tanh", "gelu", "gelu_approx_tanh", "relu", "swish"])
@pytest.mark.parametrize("suffix", ["", "_backward"])
def test_large_inputs_stay_finite(mode: str, suffix: str) -> None:
    x = np.array([-3e4, -200, -90, 90, 200, 3e4], np.float32)
    arrays = [x] if not suffix else [np.ones_like(x), x]
    assert np.isfinite(one(mode + suffix, arrays)).all()


INTEGER_MODES = {
    "abs": 1, "add": 2, "add_square": 2, "bias": 2, "ceil": 1, "floor": 1, "identity": 1, "max": 2, "min": 2,
    "mul": 2, "neg": 1, "scale": 2, "sub": 2, "div": 2, "mod": 2,
}  # fmt: skip


@pytest.mark.parametrize("mode", INTEGER_MODES)
def test_integers_compute_exactly(mode: str) -> None:
    rng = np.random.default_rng(5)
    # Beyond 2^24, where float32 no longer holds every integer.
    a = rng.integers(-(2**30), 2**30, (4, 33), dtype=np.int32)
    b = rng.integers(-9, 9, (4, 33), dtype=np.int32)
    b[b == 0] = 7
    arrays = [a, b][: INTEGER_MODES[mode]]
    if mode in ("mul", "scale"):
        arrays[0] = a // 16
    got = one(mode, arrays, io_data_type="int32", compute_data_type="int32")
    exact = {"div": lambda: np.trunc(a / b).astype(np.int64), "mod": lambda: np.fmod(a, b)}
    with np.errstate(invalid="ignore"):
        want = exact[mode]() if mode in exact else expected(mode, arrays, {}).astype(np.int64)
    np.testing.assert_array_equal(got, want)


def test_boolean_graphs() -> None:
    rng = np.random.default_rng(6)
    a, b = rng.random((2, 7, 9)) < 0.5
    for compute in ("bool", "float32"):
        options = {"io_data_type": "bool", "compute_data_type": compute}
        np.testing.assert_array_equal(one("logical_and", [a, b], **options), a & b)
        np.testing.assert_array_equal(one("logical_or", [a, b], **options), a | b)
        np.testing.assert_array_equal(one("logical_not", [a], **options), ~a)
        np.testing.assert_array_equal(one("cmp_eq", [a, b], **options), a == b)


def test_comparisons_write_ones_and_zeros_in_any_type() -> None:
    x = np.array([1, 2, 3], np.float32)
    for out in ("bool", "int8", "bfloat16", "float32"):
        np.testing.assert_array_equal(one("cmp_gt", [x, 2.0], out=out).astype(np.float32), [0, 0, 1])


def test_a_mask_of_any_type_chooses_where_it_is_not_zero() -> None:
    a, b = np.float32([1, 2, 3]), np.float32([-1, -2, -3])
    for mask in (np.array([True, False, True]), np.int8([2, 0, -1]), np.float32([0.25, 0, -4])):
        np.testing.assert_array_equal(one("binary_select", [a, b, mask]), [1, -2, 3])


def test_a_node_computes_in_its_own_type() -> None:
    x = np.float32([1 + 2**-10])
    graph = pygraph(io_data_type="float32", compute_data_type="float32")
    given = graph.tensor(x.shape)
    for compute in (None, "bfloat16", "float16"):
        graph.mul(given, given, compute_data_type=compute).set_output(True)
    wide, brain, half = evaluate(graph, x)
    assert wide == np.float32(x * x)
    assert brain == 1.0  # bfloat16 has 8 bits
    assert half == np.float16(x.astype(np.float16) ** 2)


def test_tensors_inside_the_graph_are_rounded_to_their_type() -> None:
    x = np.float32([1 + 2**-10, 3])
    for inner, want in (("float32", [2**-10, 2]), ("bfloat16", [0, 2]), ("int32", [0, 2])):
        graph = pygraph(io_data_type="float32", intermediate_data_type=inner)
        given = graph.tensor(x.shape)
        graph.sub(graph.identity(given), graph.scalar(1.0, rank=1)).set_output(True)
        np.testing.assert_array_equal(evaluate(graph, x)[0], np.float32(want))


def test_conversions_to_integers_round_to_even_and_saturate() -> None:
    x = np.float32([-1e9, -129, -2.5, -0.5, 0.5, 1.5, 2.5, 127.4, 300, np.inf, np.nan])
    np.testing.assert_array_equal(
        one("identity", [x], out="int8"), np.int8([-128, -128, -2, 0, 0, 2, 2, 127, 127, 127, 0])
    )
    np.testing.assert_array_equal(one("identity", [x], out="uint8"), np.uint8([0, 0, 0, 0, 0, 2, 2, 127, 255, 255, 0]))
    wide = np.int32([-(2**31), -129, 5, 128, 2**31 - 1])
    narrowed = one("identity", [wide], out="int8", compute_data_type="int32")
    np.testing.assert_array_equal(narrowed, np.int8([-128, -128, 5, 127, 127]))


@pytest.mark.parametrize("name, largest", [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_conversions_to_8_bit_floats_saturate(name: str, largest: float) -> None:
    x = np.float32([-1e6, -1.1, 0, 1.1, 1e6, np.nan])
    got = one("identity", [x], out=name).astype(np.float32)
    inner = x[1:4].astype(ml_dtypes.finfo(name).dtype).astype(np.float32)
    np.testing.assert_array_equal(got, [-largest, *inner, largest, np.nan])


def test_inputs_broadcast_with_each_other_and_with_numbers() -> None:
    rng = np.random.default_rng(7)
    row, column, plane = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 1, 5), (4, 1), (3, 4, 5)))
    graph = pygraph(io_data_type="float32")
    a, b, c = (graph.tensor(array.shape) for array in (row, column, plane))
    outer = graph.mul(a, b).set_output(True)
    graph.add(graph.add(outer, c), graph.scalar(2.5, "float32")).set_output(True)
    graph.scale(graph.scalar(3.0, "float32", rank=2), graph.scalar(0.5, "float32")).set_output(True)
    got = evaluate(graph, row, column, plane)
    np.testing.assert_allclose(got[0], row * column, rtol=1e-6)
    np.testing.assert_allclose(got[1], row * column + plane + 2.5, rtol=1e-6)
    np.testing.assert_array_equal(got[2], np.full((1, 1, 1, 1), 1.5))


def test_an_index_follows_its_axis_and_its_type() -> None:
    x = np.zeros((3, 4), np.float16)
    for axis in (0, 1):
        for out in ("int32", "float16"):
            np.testing.assert_array_equal(one("gen_index", [x], {"axis": axis}, out=out), np.indices(x.shape)[axis])


def test_an_empty_graph_tensor_gives_an_empty_result() -> None:
    assert one("gelu", [np.zeros((0, 4), np.float32)]).shape == (0, 4)


def test_a_tensor_read_twice_and_several_outputs() -> None:
    x = np.float32([[1, -2], [3, -4]])
    graph = pygraph(io_data_type="float32")
    given = graph.tensor(x.shape)
    squared = graph.mul(given, given).set_output(True)
    graph.add(squared, given).set_output(True)
    first, second = evaluate(graph, x)
    np.testing.assert_array_equal(first, x * x)
    np.testing.assert_array_equal(second, x * x + x)


def declined(graph: pygraph) -> str:
    with pytest.raises(GraphNotSupportedError) as error:
        graph.create_execution_plans(target=CPU)
        graph.build_plans()
    return str(error.value)


def test_what_the_reference_declines_is_said_in_one_line() -> None:
    graph = pygraph(io_data_type="int32", compute_data_type="int32")
    graph.exp(graph.tensor((4,))).set_output(True)
    assert "xla: exp with compute type int32, needs a floating type" in declined(graph)
    graph = pygraph(io_data_type="bool", compute_data_type="bool")
    graph.add(graph.tensor((4,)), graph.tensor((4,))).set_output(True)
    assert "xla: add with compute type bool, needs a number type" in declined(graph)
    graph = pygraph(io_data_type="float32", compute_data_type="float8_e5m2")
    graph.neg(graph.tensor((4,))).set_output(True)
    assert "only stores numbers" in declined(graph)


def test_4_bit_types_are_left_to_the_generic_reference() -> None:
    graph = pygraph(io_data_type="float4_e2m1fn")
    graph.neg(graph.tensor((4,))).set_output(True)
    graph.create_execution_plans(target=CPU)
    assert [plan.engine_id for plan in graph.plans] == [21_999]
    assert "dtype float4_e2m1fn, not served" in {decline.reason for decline in graph.declines}


def test_64_bit_types_need_jaxs_64_bit_mode() -> None:
    def doubled() -> pygraph:
        graph = pygraph(io_data_type="float64", compute_data_type="float64")
        graph.exp(graph.tensor((4,))).set_output(True)
        return graph

    run = planned(doubled()).build_plans()[1].fn
    with pytest.raises(GraphNotSupportedError, match=r"data type float64, needs JAX's 64-bit mode \(jax_enable_x64\)"):
        jax.jit(run)(jnp.zeros(4))
    x = np.linspace(-1, 1, 4)
    with jax.enable_x64(True):
        # Built outside of the mode, traced within.
        np.testing.assert_allclose(jax.jit(run)(x)[0], np.exp(x), rtol=1e-15)


@pytest.mark.parametrize("dtype, answer", [("float64", np.exp), ("int64", np.negative)], ids=["float64", "int64"])
def test_64_bit_types_run_through_execute(dtype: str, answer: Any) -> None:
    graph = pygraph(io_data_type=dtype, intermediate_data_type=dtype, compute_data_type=dtype)
    x = graph.tensor((4,))
    y = getattr(graph, answer.__name__.replace("negative", "neg"))(x).set_output(True)
    given, got = np.array([-(2**40), -1, 3, 2**40], dtype), np.zeros(4, dtype)
    if dtype == "float64":
        given = given / 2**40
    planned(graph).execute({x: given, y: got})
    np.testing.assert_allclose(got, answer(given), rtol=1e-15)


def planned(graph: pygraph) -> pygraph:
    graph.create_execution_plans(target=CPU)
    return graph
