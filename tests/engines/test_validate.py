"""`pygraph.validate` where there are engines: it lowers and freezes what cuDNN can lower, and leaves the rest open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cudnn_jax
from cudnn_jax import _ffi
from cudnn_jax.engines import planning
from cudnn_jax.engines.linear_attention import samples
from cudnn_jax.engines.target import CPU
from cudnn_jax.graph import OPERATIONS, GraphFrozenError, GraphValidationError
from support import stub_libcuda
from support.stub_libcuda import stub_folder as stub_folder


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without one, also where there is one."""
    monkeypatch.setattr(_ffi, "device_count", lambda: 0)


def attention() -> planning.pygraph:
    graph = cudnn_jax.pygraph(io_data_type="float32")
    q, k, v = (graph.tensor((2, 4, 16, 32)) for _ in range(3))
    graph.sdpa(q, k, v, generate_stats=False)[0].set_output(True)
    return graph


def delta_net() -> planning.pygraph:
    graph = samples.forward((5, 11), 2, 8, 4)
    for tensor in graph.nodes[0].outputs.values():
        tensor.set_output(False)
    return graph


def test_the_tables_say_what_the_lowering_has() -> None:
    lowered = {operation.type for operation in OPERATIONS.values() if not operation.python_only}
    assert _ffi.lowered_node_types() == sorted(lowered)


def test_what_cudnn_can_lower_is_frozen() -> None:
    graph = attention()
    graph.validate()
    assert graph.validated and graph.frozen
    with pytest.raises(GraphFrozenError):
        graph.tensors[0].set_dim((2, 4, 16, 64))
    graph.validate(CPU)
    graph.create_execution_plans()


def test_a_graph_that_breaks_a_rule_is_told_first() -> None:
    graph = attention()
    graph.tensors[0].set_dim((2, 3, 16, 32)).set_stride((1536, 512, 32, 1))
    with pytest.raises(GraphValidationError):
        graph.validate()
    assert not graph.frozen


def test_what_python_alone_runs_stays_open_and_is_checked_again() -> None:
    graph = delta_net()
    graph.validate()
    assert graph.validated and not graph.frozen
    gate = graph.nodes[0].inputs["g"]
    gate.set_dim((17, 2))
    assert not graph.validated
    with pytest.raises(GraphValidationError, match="g has dim"):
        graph.create_execution_plans(target=CPU)
    gate.set_dim((16, 2))
    graph.create_execution_plans(target=CPU)
    assert graph.frozen


def test_reading_the_hash_freezes_nothing() -> None:
    graph = attention()
    graph.hash()
    graph.canonical()
    assert not graph.frozen


def test_a_virtual_result_of_a_python_only_graph_is_filled(rng: np.random.Generator) -> None:
    """The same numbers as with the outputs asked for."""
    made = []
    arrays: dict[str, Any] = {}
    for graph in (delta_net(), samples.forward((5, 11), 2, 8, 4)):
        for tensor in graph.inputs:
            arrays.setdefault(tensor.name, _drawn(tensor, rng).astype(_dtype(tensor)))
        out = {tensor: np.zeros(tensor.dim, _dtype(tensor)) for tensor in graph.nodes[0].outputs.values()}
        graph.create_execution_plans(target=CPU)
        graph.execute({tensor: arrays[tensor.name] for tensor in graph.inputs} | out)
        made.append([np.asarray(array, np.float32) for array in out.values()])
    assert all(np.abs(array).max() > 0 for array in made[0])
    for virtual, asked in zip(*made, strict=True):
        np.testing.assert_array_equal(virtual, asked)
    graph = delta_net()
    with pytest.raises(ValueError, match=r"buffers: none for .*\(output\)"):
        graph.execute({tensor: arrays[tensor.name] for tensor in graph.inputs})


def _dtype(tensor: Any) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(tensor.data_type.value)


def _drawn(tensor: Any, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    if tensor.name == "cu_seqlens":
        return np.array([0, 5, 16])
    return -rng.uniform(0.1, 1, tensor.dim) if tensor.name == "g" else rng.uniform(-0.3, 0.5, tensor.dim)


CHILD = """
import json
from cudnn_jax.engines.linear_attention import samples
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import named
from cudnn_jax.graph import GraphNotSupportedError

def attention(d=64, dtype="bfloat16", mask=None, uid=None):
    graph = pygraph(io_data_type=dtype)
    q, k, v = (graph.tensor((2, 4, 128, d), (512 * d, d, 4 * d, 1)) for _ in range(3))
    if mask:
        kept = graph.tensor(mask, data_type="bool")
        mask = graph.binary_select(graph.scalar(0.0, "float32"), graph.scalar(float("-inf"), "float32"), kept)
    graph.sdpa(q, k, v, generate_stats=False, bias=mask)[0].set_output(True)
    return graph

def alone():
    graph = pygraph(io_data_type="bfloat16")
    graph.transpose(graph.tensor((4, 8, 64)), (1, 0, 2)).set_output(True)
    return graph

told = {}
for name, graph in {
    "plain": attention(), "masked": attention(mask=(2, 1, 1, 128)), "float32": attention(dtype="float32"),
    "head dim": attention(100), "transpose": alone(), "gdn": samples.forward((5, 11), 2, 8, 4),
}.items():
    try:
        graph.validate(named("h200"))
        told[name] = ["ok", graph.frozen]
    except GraphNotSupportedError as error:
        told[name] = [str(error), graph.frozen]
        graph.set_mine = 1
        graph.create_execution_plans(target=named("h200"))
        told[name].append([plan.engine for plan in graph.plans])
print(json.dumps(told))
"""


def test_what_cudnn_refuses_is_told_by_validate(stub_folder: Path) -> None:
    told = stub_libcuda.told_by(CHILD, stub_folder)
    assert told["plain"] == told["masked"] == ["ok", True]
    assert told["gdn"] == ["ok", False]
    # What only planning finds out is not told here.
    assert told["float32"] == ["ok", True]
    # A refused graph stays open, and an engine of Python serves it all the same.
    assert "hidden_dim should be multiple of 8" in told["head dim"][0]
    assert told["transpose"][0] == "Transpose operation requires cuDNN version >= 9.22.0"
    for refused in (told["head dim"], told["transpose"]):
        assert "\n" not in refused[0] and refused[1:] == [False, ["xla"]]
