"""The Python side of the layout: what engines write is what the C++ side reads."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest

from cudnn_jax import _ffi, data_type
from cudnn_jax.engines.kernels import CubinImage, CuteObject
from cudnn_jax.engines.program import ProgramBuilder, immediate, spec
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import Tensor, pygraph

H200 = Target("cuda", device_kind="NVIDIA H200", sm=90)
IMAGE = CubinImage(b"image", "add_one")
OBJECT = CuteObject(b"object", "gelu", "4.8.1")


def add_graph() -> tuple[pygraph, Tensor, Tensor, Tensor]:
    graph = pygraph(io_data_type=data_type.FLOAT, compute_data_type=data_type.FLOAT)
    a = graph.tensor(dim=[4, 8], stride=[8, 1])
    b = graph.tensor(dim=[4, 8], stride=[8, 1])
    out = graph.add(a, b)
    out.set_output(True)
    return graph, a, b, out


def payload_of(data: bytes) -> Any:
    return msgpack.unpackb(msgpack.unpackb(data)["payload"])


def test_operands_count_inputs_then_outputs() -> None:
    graph, a, b, out = add_graph()
    builder = ProgramBuilder(graph, H200)
    assert [builder.operand(tensor) for tensor in (a, b, out)] == [("operand", i) for i in range(3)]
    other = add_graph()[1]
    with pytest.raises(ValueError, match="neither an input nor an output of the graph"):
        builder.operand(other)


def test_workspace_slices_are_aligned_and_apart() -> None:
    builder = ProgramBuilder(add_graph()[0], H200)
    assert [builder.workspace(size) for size in (1, 300, 256, 8)] == [0, 256, 768, 1024]
    assert builder.build().workspace == 1032


@pytest.mark.parametrize(
    ("number", "dtype", "value"),
    [
        (3, "int32", 3),
        (-(2**31), "int32", -(2**31)),
        (2**63 - 1, "int64", 2**63 - 1),
        (True, "int64", 1),
        (1, "float32", 1.0),
        (-3.4e38, "float32", -3.4e38),
        (1e300, "float64", 1e300),
    ],
)
def test_an_immediate_is_a_number_of_its_dtype(number: float, dtype: str, value: float) -> None:
    kind, (told, kept) = immediate(number, dtype)  # type: ignore[misc]
    assert (kind, told, kept, type(kept)) == ("immediate", dtype, value, type(value))
    builder = ProgramBuilder(add_graph()[0], H200)
    builder.cubin(IMAGE, (1, 1, 1), [immediate(number, dtype)])
    assert _ffi.program_check(builder.build().data)["steps"] == ["cubin"]


@pytest.mark.parametrize(
    ("number", "dtype", "error", "message"),
    [
        (1, "int8", ValueError, "dtype 'int8', the rule is one of int32, int64, float32, float64"),
        (2**31, "int32", ValueError, "2147483648 is no int32, the rule is -2147483648 to 2147483647"),
        (2**63, "int64", ValueError, "9223372036854775808 is no int64"),
        (3.5e38, "float32", ValueError, "3.5e+38 is no float32"),
        (math.nan, "float64", ValueError, "nan is no float64"),
        (math.inf, "float64", ValueError, "inf is no float64"),
        (1.5, "int32", TypeError, "float"),
    ],
)
def test_an_immediate_out_of_its_range_is_refused(number: float, dtype: str, error: Any, message: str) -> None:
    with pytest.raises(error) as raised:
        immediate(number, dtype)
    assert message in str(raised.value)


def test_kernels_become_steps() -> None:
    graph, a, b, out = add_graph()

    def build() -> Any:
        builder = ProgramBuilder(graph, H200)
        scratch = builder.workspace(64)
        args = [builder.operand(a), builder.operand(out), ("workspace", scratch), immediate(2, "int32")]
        builder.cubin(IMAGE, (5, 2, 1), args)
        builder.cute(OBJECT, [builder.operand(b), immediate(0.5, "float32")])
        return builder.build()

    program = build()
    content = payload_of(program.data)
    assert content["requires"] == {"platform": "cuda", "arch": 90, "cudnn": None, "cutedsl": "4.8.1"}
    assert content["steps"] == [
        {
            "kind": "cubin",
            "kernel": "add_one",
            "image": b"image",
            "grid": [5, 2, 1],
            "args": [["operand", 0], ["operand", 2], ["workspace", 0], ["immediate", ["int32", 2]]],
        },
        {
            "kind": "cute",
            "function": "gelu",
            "object": b"object",
            "args": [["operand", 1], ["immediate", ["float32", 0.5]]],
        },
    ]
    assert set(spec()["steps"]["cubin"]["fields"]) == set(content["steps"][0]) - {"kind"}
    assert set(spec()["steps"]["cute"]["fields"]) == set(content["steps"][1]) - {"kind"}
    assert _ffi.program_check(program.data)["sha256"] == program.sha256
    assert build().data == program.data


def test_one_program_has_functions_of_one_version_of_the_dsl() -> None:
    builder = ProgramBuilder(add_graph()[0], H200, cutedsl="4.8.0")
    with pytest.raises(ValueError, match=r"cute: gelu is of CuTe-DSL 4\.8\.1, the program of 4\.8\.0"):
        builder.cute(OBJECT, [])


def test_a_program_that_breaks_the_layout_is_not_built() -> None:
    builder = ProgramBuilder(add_graph()[0], H200)
    builder.cubin(IMAGE, (1, 70_000, 1), [("operand", 3)])
    with pytest.raises(ValueError, match=r"payload\.steps\[0\]\.args\[0\]: operand 3, the program has 3"):
        builder.build()
