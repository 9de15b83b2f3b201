"""`cudnn_jax.call`: a graph as a JAX function, inlined and through a program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax import _ffi
from cudnn_jax.engines import manifest
from support import standin

DIM = (2, 3, 5, 8)
STRIDE = (120, 8, 24, 1)  # memory order (0, 2, 1, 3)


def attention(stride: tuple[int, ...] | None = STRIDE, **types: Any) -> cudnn_jax.pygraph:
    graph = cudnn_jax.pygraph(io_data_type="float32")
    q = graph.tensor(DIM, stride, name="q", **types)
    k, v = graph.tensor(DIM, name="k"), graph.tensor(DIM, name="v")
    out, _ = graph.sdpa(q=q, k=k, v=v, attn_scale=0.5, generate_stats=False)
    out.set_output(True).set_dim(DIM).set_stride(stride or (120, 40, 8, 1))
    return graph


def qkv(rng: np.random.Generator) -> list[jax.Array]:
    return [jnp.asarray(rng.standard_normal(DIM), jnp.float32) for _ in "qkv"]


def oracle(q: jax.Array, k: jax.Array, v: jax.Array) -> np.ndarray:
    q64, k64, v64 = (np.asarray(x, np.float64) for x in (q, k, v))
    p = np.exp(0.5 * q64 @ k64.swapaxes(-1, -2))
    return p / p.sum(-1, keepdims=True) @ v64


@pytest.mark.parametrize("jitted", [True, False])
def test_arrays_and_results_have_logical_dims(jitted: bool, rng: np.random.Generator) -> None:
    graph, arrays = attention(), qkv(rng)

    def run(*given: jax.Array) -> tuple[jax.Array, ...]:
        return cudnn_jax.call(graph, *given)

    (out,) = jax.jit(run)(*arrays) if jitted else run(*arrays)
    np.testing.assert_allclose(out, oracle(*arrays), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("stride", [STRIDE, None])
def test_a_program_gets_memory_in_the_tensors_strides(
    stride: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    standin.register_symbol(tmp_path)
    slot = manifest.EngineSlot(1, "mix", ("support.standin", "Mix"))
    arrays = qkv(rng)
    q, k, v = (np.asarray(x) for x in arrays)
    # The stand-in adds memory to memory, whatever the axes mean.
    memory = (0, 2, 1, 3) if stride else (0, 1, 2, 3)
    mixed = q.transpose(memory).ravel() + 10 * k.ravel() + 100 * v.ravel()
    expected = mixed.reshape(*(DIM[axis] for axis in memory)).transpose(memory)
    before = _ffi.counters()["executions"]
    with standin.family(monkeypatch, "sdpa_fwd", slot):
        (out,) = cudnn_jax.call(attention(stride), *arrays, implementation="mix")
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert _ffi.counters()["executions"] == before + 1


def test_a_graph_can_be_called_again_and_planned_by_its_owner(rng: np.random.Generator) -> None:
    graph, arrays = attention(), qkv(rng)
    first = cudnn_jax.call(graph, *arrays)
    graph.create_execution_plans()
    np.testing.assert_array_equal(first[0], cudnn_jax.call(graph, *arrays)[0])
    assert graph.frozen


def test_explain_says_what_is_transposed(rng: np.random.Generator) -> None:
    arrays = qkv(rng)
    (row,) = cudnn_jax.explain(lambda *a: cudnn_jax.call(attention(), *a), *arrays).rows
    assert [note.split(" is ")[0] for note in row["notes"]] == ["q float32[2, 3, 5, 8]", "float32[2, 3, 5, 8]"]
    (row,) = cudnn_jax.explain(lambda *a: cudnn_jax.call(attention(None), *a), *arrays).rows
    assert row["notes"] == [] and row["engine"] == "xla"


BAD: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (lambda q, k, v: cudnn_jax.call(3, q, k, v), TypeError, "graph is int; the rule: a cudnn_jax.pygraph"),
    (
        lambda q, k, v: cudnn_jax.call(attention(), q, k),
        ValueError,
        "2 arrays came; the rule: one for each of 3 inputs",
    ),
    (lambda q, k, v: cudnn_jax.call(attention(), q, k, v[:1]), ValueError, r"v float32\[2, 3, 5, 8\] has shape \(1, 3"),
    (lambda q, k, v: cudnn_jax.call(attention(), q[0], k, v), ValueError, r"q float32\[2, 3, 5, 8\] has shape \(3, 5"),
    (lambda q, k, v: cudnn_jax.call(attention(), q, k.astype(jnp.float16), v), TypeError, "has dtype float16"),
    (lambda q, k, v: cudnn_jax.call(attention(), q, k, [1]), TypeError, "is a list; the rule: an array"),
    (lambda q, k, v: cudnn_jax.call(attention((240, 80, 16, 1)), q, k, v), ValueError, "strides without gaps"),
    (lambda q, k, v: cudnn_jax.call(attention(data_type="int64"), q, k, v), TypeError, "jax_enable_x64"),
    (lambda q, k, v: cudnn_jax.call(attention(), q, k, v, implementation=1), TypeError, "implementation is 1"),
    (
        lambda q, k, v: cudnn_jax.call(attention(), q, k, v, implementation="cudnn"),
        cudnn_jax.GraphNotSupportedError,
        "platform cpu, serves cuda",
    ),
    (
        lambda q, k, v: jax.vmap(lambda x: cudnn_jax.call(attention(), x, k, v))(q[None]),
        NotImplementedError,
        "vmap rule",
    ),
    (
        lambda q, k, v: jax.jvp(lambda x: cudnn_jax.call(attention(), x, k, v), (q,), (q,)),
        NotImplementedError,
        "no forward mode",
    ),
]


@pytest.mark.parametrize(("bad", "error", "message"), BAD)
def test_what_does_not_fit_is_refused(
    bad: Callable[..., Any], error: type[Exception], message: str, rng: np.random.Generator
) -> None:
    with pytest.raises(error, match=message):
        bad(*qkv(rng))


def test_a_graph_without_inputs_is_refused() -> None:
    graph = cudnn_jax.pygraph(io_data_type="float32")
    graph.exp(graph.scalar(1.0)).set_output(True)
    with pytest.raises(ValueError, match="graph has no inputs; the rule: at least one"):
        cudnn_jax.call(graph)


def test_a_graph_is_a_function_of_jax_arrays(rng: np.random.Generator) -> None:
    graph = cudnn_jax.pygraph(io_data_type="float32")
    x, w = graph.tensor((2, 3), name="x"), graph.tensor((3, 4), name="w")
    graph.reduction(graph.matmul(x, w), mode="MAX").set_dim((2, 1)).set_output(True)
    fn = graph.as_jax()
    assert graph.frozen
    arrays = [jnp.asarray(rng.standard_normal(tensor.dim), jnp.float32) for tensor in (x, w)]
    (made,) = jax.jit(fn)(*arrays)
    expected = np.max(np.asarray(arrays[0], np.float64) @ np.asarray(arrays[1], np.float64), 1, keepdims=True)
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="1 arrays came; the rule: one for each of 2 inputs: x float32"):
        fn(arrays[0])
    with pytest.raises(NotImplementedError, match="has no vmap rule"):
        jax.vmap(fn, in_axes=(0, None))(arrays[0][None], arrays[1])


def test_an_axis_may_be_empty_wherever_it_is() -> None:
    graph = cudnn_jax.pygraph(io_data_type="float32")
    x, w = graph.tensor((2, 0)), graph.tensor((0, 3))
    y = graph.matmul(x, w).set_output(True)
    graph.neg(graph.mul(x, graph.tensor((2, 1)))).set_output(True)
    fn, arrays = graph.as_jax(), [jnp.ones(each.dim) for each in graph.inputs]
    made = jax.jit(fn)(*arrays)
    assert [each.shape for each in made] == [each.dim for each in graph.outputs]
    np.testing.assert_array_equal(made[graph.outputs.index(y)], np.zeros((2, 3)))
    gradients = jax.grad(lambda *given: sum(each.sum() for each in fn(*given)), argnums=(0, 1, 2))(*arrays)
    assert [(each.shape, float(each.sum())) for each in gradients] == [(each.dim, 0.0) for each in graph.inputs]
    assert cudnn_jax.explain(fn, *arrays).rows[0]["notes"] == []


def test_forward_mode_passes_integers_by() -> None:
    graph = cudnn_jax.pygraph(io_data_type="float32")
    x = graph.tensor((3,))
    graph.gen_index(x, axis=0).set_data_type("int32").set_output(True)
    graph.exp(x).set_output(True)
    fn, value = graph.as_jax("xla"), jnp.arange(3.0)
    tangents = jax.jit(lambda x: jax.jvp(fn, (x,), (x,))[1])(value)
    told = {out.data_type.value: tangent for out, tangent in zip(graph.outputs, tangents, strict=True)}
    assert told["int32"].dtype == jax.dtypes.float0
    np.testing.assert_allclose(told["float32"], value * np.exp(value), rtol=1e-6)


def test_names_stay_on_their_lines_in_messages() -> None:
    graph = cudnn_jax.pygraph("g\n1", io_data_type="float32")
    graph.neg(graph.tensor((2,), name="x\n1")).set_output(True)
    with pytest.raises(ValueError, match=r"^x\\n1 float32\[2\] has shape \(3,\)"):
        cudnn_jax.call(graph, jnp.zeros(3))
    with pytest.raises(cudnn_jax.GraphNotSupportedError, match=r"cannot serve g\\n1; the rule"):
        cudnn_jax.call(graph, jnp.zeros(2), implementation="nonsense")


def test_a_function_of_a_graph_runs_what_it_names() -> None:
    graph = cudnn_jax.pygraph(io_data_type="float32")
    graph.neg(graph.tensor((2,))).set_output(True)
    with pytest.raises(cudnn_jax.GraphNotSupportedError, match="implementation='cutile' cannot serve"):
        graph.as_jax("cutile")(jnp.zeros(2))
    with pytest.raises(
        cudnn_jax.GraphNotSupportedError, match="a graph of POINTWISE; .* one of cudnn, cutedsl, cutedsl_"
    ):
        jax.eval_shape(graph.as_jax("nonsense"), jnp.zeros(2))
