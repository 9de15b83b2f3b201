"""Buffers with strides of their own: the reference engine takes them and says so, a program refuses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cudnn_jax
from cudnn_jax import _ffi
from cudnn_jax.engines.base import Inline, Program
from cudnn_jax.engines.execution import operands_of
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.engines.target import CPU

DIM = (3, 4, 5)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without one, also where there is one."""
    monkeypatch.setattr(_ffi, "device_count", lambda: 0)


def sum_of_two() -> pygraph:
    graph = cudnn_jax.pygraph(io_data_type="float32")
    a, b = (graph.tensor(DIM, name=name) for name in "ab")
    graph.add(a, b).set_output(True).set_name("out")
    graph.create_execution_plans(target=CPU)
    return graph


def buffers(graph: pygraph, *arrays: np.ndarray[Any, Any]) -> dict[Any, Any]:
    return dict(zip((*graph.inputs, *graph.outputs), arrays, strict=True))


def turned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same elements, the first axis fastest."""
    return np.asfortranarray(array)


def test_the_reference_reads_and_writes_each_buffer_by_its_own_strides(rng: np.random.Generator) -> None:
    graph = sum_of_two()
    artifact = graph.build_plans()[1]
    assert isinstance(artifact, Inline) and artifact.any_strides
    a, b = (rng.standard_normal(DIM, np.float32) for _ in range(2))
    wide = np.full((3, 4, 10), np.nan, np.float32)
    for given in ((turned(a), b), (a, turned(b)), (a[::-1].copy()[::-1].copy(), np.broadcast_to(b[:1], DIM))):
        for out in (np.zeros(DIM, np.float32), np.zeros(DIM[::-1], np.float32).T, wide[:, :, ::2]):
            graph.execute(buffers(graph, *given, out))
            np.testing.assert_array_equal(out, given[0] + given[1])
    assert np.isnan(wide[:, :, 1::2]).all(), "what lies between is not written"


def test_a_pack_keeps_each_operands_own_strides() -> None:
    graph = sum_of_two()
    a, b, out = turned(np.zeros(DIM, np.float32)), np.zeros(DIM, np.float32), np.zeros((3, 4, 10), np.float32)[..., ::2]
    pack = operands_of(graph, any_strides=True).pack(buffers(graph, a, b, out))
    strides = {operand.uid: operand.stride for operand in pack.operands}
    assert [strides[tensor.uid] for tensor in (*graph.inputs, *graph.outputs)] == [(1, 3, 12), (20, 5, 1), (40, 10, 2)]
    assert all(operand.shape == DIM for operand in pack.operands)
    single = cudnn_jax.pygraph(io_data_type="float32")
    x = single.tensor((1, 4))
    single.exp(x).set_output(True)
    given = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (1, 4), (28, 4))
    pack = operands_of(single).pack({x: given, single.outputs[0]: np.zeros((1, 4), np.float32)})
    assert pack.operands[pack.index_of(x.uid)].stride == (7, 1)


REFUSED = {
    "sizes": (lambda out: np.zeros((3, 4, 6), np.float32), "the graph has dim (3, 4, 5), the buffer has (3, 4, 6)"),
    "rank": (lambda out: out[0], "the graph has dim (3, 4, 5), the buffer has (4, 5)"),
    "backwards": (lambda out: out[::-1], "the buffer has stride (-20, 5, 1), the rule is 0 or more"),
    "folded": (
        lambda out: np.lib.stride_tricks.as_strided(out, DIM, (4, 20, 4)),
        "an output, and two elements of the buffer of stride (1, 5, 1) lie on one address",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_sizes_are_refused_whatever_the_strides(name: str) -> None:
    graph = sum_of_two()
    change, message = REFUSED[name]
    arrays = [np.zeros(DIM, np.float32) for _ in range(3)]
    with pytest.raises(ValueError) as raised:
        graph.execute(buffers(graph, *arrays[:2], change(arrays[2])))
    assert str(raised.value) == f"tensor 'out' (uid 3): {message}"


def test_overlaps_are_found_by_the_strides_that_came() -> None:
    graph = sum_of_two()
    memory = np.zeros((3, 8, 8), np.float32)
    even, odd, apart = memory[:, ::2, :5], memory[:, 1::2, :5], np.ones(DIM, np.float32)
    with pytest.raises(ValueError, match=r"'out' \(uid 3\): an output, and its buffer overlaps that of tensor 'a'"):
        graph.execute(buffers(graph, even, apart, even))
    graph.execute(buffers(graph, even, apart, odd))
    assert memory.sum() == odd.sum() == apart.sum()


def test_a_program_has_the_strides_it_was_built_for() -> None:
    graph = sum_of_two()
    program = ProgramBuilder(graph, CPU).build()
    assert isinstance(program, Program) and not program.any_strides
    with pytest.raises(ValueError, match="any_strides, and a program has the strides that it was built for"):
        _ffi.Executable(operands_of(graph, any_strides=True), program.data)
    arrays = [np.zeros(DIM, np.float32) for _ in range(3)]
    executable = _ffi.Executable(operands_of(graph), program.data)
    with pytest.raises(
        ValueError, match=r"tensor 'a' .* the graph has stride \(20, 5, 1\), the buffer has \(1, 3, 12\)"
    ):
        executable.execute(buffers(graph, turned(arrays[0]), *arrays[1:]), None, None)
    executable.execute(buffers(graph, *arrays), None, None)
