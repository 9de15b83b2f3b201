"""Which outputs lie on other buffers, or on themselves: found out element by element, as a search through all does."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import cudnn_jax
from cudnn_jax import _ffi, data_type

BASE = 1 << 20
SIZE = 8
STEP = 16 // SIZE  # operands lie on multiples of 16 bytes


class Key:
    pass


IN, OUT = Key(), Key()
Layout = tuple[tuple[int, ...], tuple[int, ...]]


def addresses(layout: Layout, offset: int = 0) -> list[int]:
    """Of each element, counted in elements."""
    shape, strides = layout
    indices = itertools.product(*map(range, shape))
    return [offset + sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices]


def read(source: Layout, result: Layout, offset: int, dtype: str = "float64") -> None:
    """A call whose output lies `offset` elements of 8 bytes behind its input."""
    layouts = {IN: (source, 0), OUT: (result, offset)}
    rows = [(key, f"tensor {i}", i, dtype, *map(list, layouts[key][0]), key is OUT) for i, key in enumerate((IN, OUT))]
    views = {
        key: cudnn_jax.DeviceView(BASE + SIZE * at, layout[0], dtype, layout[1])
        for key, (layout, at) in layouts.items()
    }
    _ffi.GraphOperands(rows).pack(views)


def refusal(*arguments: Any) -> str | None:
    try:
        read(*arguments)
    except ValueError as error:
        return str(error)
    return None


def layouts_of(rank: int) -> st.SearchStrategy[tuple[Layout, Layout, int]]:
    dims = st.tuples(*[st.integers(1, 4)] * rank)
    return st.tuples(dims, dims, st.tuples(*[st.integers(0, 12)] * rank), st.integers(-20, 20)).map(
        lambda x: ((x[0], x[2]), (x[1], x[2]), STEP * x[3])
    )


@given(st.integers(1, 4).flatmap(layouts_of))
def test_an_output_whose_elements_share_an_address_is_refused(case: tuple[Layout, Layout, int]) -> None:
    _, result, _ = case
    every = addresses(result)
    message = refusal(result, result, 10_000)
    folded = f"tensor 1: an output with dim {result[0]} and stride {result[1]}, the rule is that no two elements"
    assert (message is not None and message.startswith(folded)) == (len(set(every)) < len(every)), message


@given(st.integers(1, 4).flatmap(layouts_of))
def test_equal_strides_are_told_apart_exactly(case: tuple[Layout, Layout, int]) -> None:
    source, result, offset = case
    every = addresses(result, offset)
    assume(len(set(every)) == len(every))
    shared = not set(every).isdisjoint(addresses(source))
    message = refusal(source, result, offset)
    assert message == ("tensor 1: an output, and its buffer overlaps that of tensor 0" if shared else None)


def test_other_strides_and_sizes_are_apart_where_their_ranges_are() -> None:
    rows, columns = ((4, 4), (16, 1)), ((4, 4), (1, 16))
    assert refusal(rows, columns, 100) is None
    assert "overlaps" in (refusal(rows, columns, 4) or "")


def test_irregular_strides_are_given_up_on() -> None:
    many, one = (9,) * 14, (1,) * 14
    strides = tuple(2 * STEP * 3**i for i in range(14))
    # No element lies there, which only a long search finds.
    assert "overlaps" in (refusal((many, strides), (one, strides), 10**6 * 2 * STEP + STEP) or "")


def test_the_reference_engine_on_halves_of_one_array(rng: np.random.Generator) -> None:
    shape, stride = (2, 4, 16, 32), (4096, 1024, 64, 1)
    graph = cudnn_jax.pygraph(io_data_type=data_type.FLOAT)
    q, k, v = (graph.tensor(dim=shape, stride=stride, name=name) for name in "qkv")
    o, _ = graph.sdpa(q, k, v, generate_stats=False)
    o.set_output(True).set_stride(stride).set_name("o")
    graph.create_execution_plans(target=cudnn_jax.engines.target.CPU)
    both, other = (rng.standard_normal((2, 4, 16, 64), np.float32) for _ in range(2))
    buffers = {q: both[..., :32], k: other[..., :32], v: other[..., 32:], o: both[..., 32:]}
    query = both[..., :32].copy()
    scores = np.exp(query @ buffers[k].swapaxes(-1, -2))
    graph.execute(buffers)
    np.testing.assert_array_equal(both[..., :32], query)
    expected = scores / scores.sum(-1, keepdims=True) @ buffers[v]
    np.testing.assert_allclose(buffers[o], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="an output, and its buffer overlaps that of tensor 'v'"):
        graph.execute(buffers | {o: buffers[v]})


def pack_in_place(offset: int) -> None:
    rows = [
        (key, name, at, "float64", [4], [1], key is OUT)
        for at, (key, name) in enumerate({IN: "in", OUT: "out"}.items())
    ]
    operands = _ffi.GraphOperands(rows)
    operands.write_over(1, 0)
    operands.pack(
        {IN: cudnn_jax.DeviceView(BASE, (4,), "float64"), OUT: cudnn_jax.DeviceView(BASE + offset, (4,), "float64")}
    )


def test_an_output_written_over_an_input_takes_its_buffer() -> None:
    pack_in_place(0)
    for offset in (16, 1024):
        with pytest.raises(ValueError, match="out: it is in, written over; the rule is one buffer for both"):
            pack_in_place(offset)


@pytest.mark.parametrize(("output", "over"), [(0, 1), (1, 1), (0, 0), (2, 0), (1, 7)])
def test_only_an_output_is_written_over_an_input(output: int, over: int) -> None:
    rows = [(key, str(at), at, "float64", [4], [1], key is OUT) for at, key in enumerate((IN, OUT))]
    with pytest.raises(ValueError, match="write_over: the rule is an output and an input"):
        _ffi.GraphOperands(rows).write_over(output, over)
