"""What the backward of a graph is, what it keeps of the forward, and what has none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax.graph.differentiation import Differentiable
from support.gradients import Formula, close, draw, given_of, outputs


def test_the_backward_of_a_norm_is_a_norm_and_kept_values_are_few(rng: np.random.Generator) -> None:
    """The forward gives the statistics alone besides, and both graphs belong to the norms' families."""
    graph = cudnn_jax.pygraph(io_data_type="bfloat16")
    x, scale = graph.tensor((8, 16)), graph.tensor((1, 16), data_type="float32")
    outputs(graph.rmsnorm(x, scale, epsilon=1e-5, norm_forward_phase="INFERENCE")[0])
    arrays = [jnp.ones(x.dim, jnp.bfloat16), jnp.ones(scale.dim, jnp.float32)]

    def loss(*given: Any) -> Any:
        return graph.as_jax()(*given)[0].astype(jnp.float32).sum()

    told = cudnn_jax.explain(jax.grad(loss, argnums=(0, 1)), *arrays)
    assert [row["family"] for row in told.rows] == ["norm_fwd", "norm_bwd"]
    assert [row["facts"] for row in told.rows] == [
        "rmsnorm fwd bfloat16 (8, 16) over axes (1,) inv_var",
        "rmsnorm bwd bfloat16 (8, 16) over axes (1,)",
    ]
    assert [x.dtype for x in jax.grad(loss, argnums=(0, 1))(*arrays)] == [jnp.bfloat16, jnp.float32]


def test_cheap_nodes_are_made_again_and_others_kept() -> None:
    graph = cudnn_jax.pygraph(io_data_type="float32")
    x, weight = graph.tensor((4, 8), name="x"), graph.tensor((8, 8))
    outputs(graph.tanh(graph.gelu(graph.matmul(graph.sin(x), weight))))
    graph.freeze()
    ready = Differentiable(graph, [0, 1])
    assert [tensor.producer.operation.name for tensor in ready.forward.outputs] == ["matmul", "tanh"]
    assert (ready.outputs, ready.kept) == ((1,), (0,))
    backward = ready.backward([0])
    assert [node.operation.name for node in backward.graph.nodes if node.operation.name in ("gelu", "sin")]
    assert {origin.side for origin in backward.origins} == {"cotangent", "kept", "input"}
    # Of a product alone nothing is kept, and what the caller gives is read as it lies, its axes in another order.
    linear = cudnn_jax.pygraph(io_data_type="float32")
    x, weight = linear.tensor((4, 8)), linear.tensor((8, 8))
    outputs(linear.matmul(x, weight))
    linear.freeze()
    ready = Differentiable(linear, [0])
    assert ready.forward is linear and ready.kept == ()
    assert [node.operation.name for node in ready.backward([0]).graph.nodes] == ["matmul"]


def test_inputs_without_a_gradient(rng: np.random.Generator) -> None:
    """Integers have none; what no output depends on, or a step function alone, has zeros."""
    graph = cudnn_jax.pygraph(io_data_type="float32")
    x, y, z, count = (graph.tensor((3,), data_type=kind) for kind in ("float32",) * 3 + ("int32",))
    outputs((graph.mul(x, count), graph.floor(y), graph.cmp_gt(z, y).set_data_type("bool")))
    arrays = [jnp.asarray(rng.standard_normal(3), jnp.float32) for _ in "xyz"] + [jnp.arange(3, dtype=jnp.int32)]
    given = given_of(graph, (x, y, z, count), arrays)
    made, pull = jax.vjp(graph.as_jax(), *given)
    assert made[2].dtype == jnp.bool_
    cotangents = (draw(made[0], rng), draw(made[1], rng), np.zeros((3,), jax.dtypes.float0))
    gradients = dict(zip([id(tensor) for tensor in graph.inputs], pull(cotangents), strict=True))
    close(gradients[id(x)], cotangents[0] * arrays[3], 1e-6)
    assert not gradients[id(y)].any() and not gradients[id(z)].any()
    assert gradients[id(count)].dtype == jax.dtypes.float0


def _gradient(build: Formula, *dims: Any, **types: Any) -> Formula:
    def run() -> Any:
        graph = cudnn_jax.pygraph(io_data_type="float32")
        tensors = [graph.tensor(dim, data_type=types.get(f"at{at}")) for at, dim in enumerate(dims)]
        outputs(build(graph, *tensors))
        arrays = [jnp.ones(tensor.dim, tensor.data_type.value) for tensor in graph.inputs]
        return jax.grad(lambda x: sum(each.sum() for each in graph.as_jax()(x, *arrays[1:])))(arrays[0])

    return run


def _rms(graph: cudnn_jax.pygraph, x: Any) -> Any:
    return graph.rmsnorm(x, epsilon=0.5, norm_forward_phase="INFERENCE")[0]


REFUSED = [
    (_gradient(lambda graph, dy, x, r: graph.rmsnorm_backward(dy, x, None, r)[0], (2, 3), (2, 3), (2, 1)), "rmsnorm_b"),
    (
        _gradient(
            lambda graph, x, starts: graph.reduction(x, starts, mode="ADD").set_dim((2, 1, 3)),
            (1, 4, 3),
            (2, 1, 1),
            at1="int32",
        ),
        "reduction has no derivative: it folds within groups",
    ),
    (
        _gradient(
            lambda graph, x, w, starts, index: graph.moe_grouped_matmul(x, w, starts, index, mode="GATHER"),
            (1, 4, 2),
            (1, 2, 2),
            (1, 1, 1),
            (1, 4, 1),
            at2="int32",
            at3="int32",
        ),
        "moe_grouped_matmul has no derivative: none of mode GATHER",
    ),
    (
        _gradient(lambda graph, x: graph.add(x, x, name="sum", compute_data_type="int32"), (3,)),
        "add 'sum' has no derivative: it computes in int32",
    ),
    (
        _gradient(lambda graph, q, k, v: graph.sdpa(q, k, v, attn_scale=graph.exp(q))[0], *[(1, 1, 1, 1)] * 3),
        "sdpa has no derivative: none by attn_scale",
    ),
    (
        _gradient(lambda graph, q, k, v: graph.sdpa(q, k, v, unfuse_fma=True)[0], *[(1, 1, 2, 4)] * 3),
        "sdpa has no derivative: sdpa_backward takes no unfuse_fma",
    ),
    (
        _gradient(
            lambda graph, q, k, v: graph.sdpa(q, k, v, kv_mask=graph.scalar(1, "int8", rank=4))[0], *[(1, 1, 2, 4)] * 3
        ),
        "sdpa has no derivative: sdpa_backward takes no kv_mask",
    ),
]


@pytest.mark.parametrize(("refused", "words"), REFUSED, ids=[words[:30] for _, words in REFUSED])
def test_a_node_without_a_derivative_is_named(refused: Formula, words: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^cudnn_jax.call: {words}.*; wrap it in jax.custom_vjp"):
        refused()


def test_an_output_without_a_derivative_leaves_the_others_theirs() -> None:
    graph = cudnn_jax.pygraph(io_data_type="float32")
    x, starts = graph.tensor((1, 4, 3)), graph.tensor((2, 1, 1), data_type="int32")
    outputs((graph.reduction(x, starts, mode="ADD").set_dim((2, 1, 3)), graph.sin(x)))
    offsets = jnp.array([0, 2], jnp.int32).reshape(2, 1, 1)
    value = jnp.ones((1, 4, 3))
    _, pull = jax.vjp(lambda x: graph.as_jax()(x, offsets)[1], value)
    close(pull(value)[0], np.cos(value), 1e-6)
    with pytest.raises(NotImplementedError, match="it folds within groups"):
        jax.grad(lambda x: sum(each.sum() for each in graph.as_jax()(x, offsets)))(value)


def test_steps_have_no_slope_whatever_they_compute_in(rng: np.random.Generator) -> None:
    graph = cudnn_jax.pygraph(io_data_type="float32")
    x = graph.tensor((3,))
    condition = graph.logical_and(x, x, compute_data_type="bool")
    outputs((graph.binary_select(x, graph.neg(x), condition), graph.reduction(x, mode="AVG").set_dim((1,))))
    value = jnp.asarray([1.0, 0.0, -2.0], jnp.float32)
    made, pull = jax.vjp(graph.as_jax(), value)
    first, second = draw(made, rng)
    close(pull((first, second))[0], first * np.array([1, -1, 1]) + second / 3, 1e-6)


def test_other_transformations_are_refused_by_name() -> None:
    graph = cudnn_jax.pygraph(io_data_type="float32")
    outputs(_rms(graph, graph.tensor((2, 3))))
    fn, x = graph.as_jax(), jnp.ones((2, 3))
    with pytest.raises(NotImplementedError, match="cudnn_jax.call has no forward mode: use reverse mode"):
        jax.jvp(fn, (x,), (x,))
    with pytest.raises(NotImplementedError, match="cudnn_jax.call: rmsnorm_backward has no derivative"):
        jax.grad(lambda x: jax.grad(lambda x: fn(x)[0].sum())(x).sum())(x)
    with pytest.raises(NotImplementedError, match="cudnn_jax.call has no vmap rule"):
        jax.vmap(jax.grad(lambda x: fn(x)[0].sum()))(x[None])


def test_a_gradient_outside_of_jit_and_in_a_remat(rng: np.random.Generator) -> None:
    graph = cudnn_jax.pygraph(io_data_type="float32")
    x, weight = graph.tensor((3, 4)), graph.tensor((4, 2))
    outputs(graph.softplus(graph.matmul(x, weight)))
    fn = graph.as_jax()
    arrays = [jnp.asarray(rng.standard_normal(each.dim), jnp.float32) for each in (x, weight)]
    expected = jax.grad(lambda x, weight: jax.nn.softplus(x @ weight).sum(), argnums=(0, 1))(*arrays)
    for wrapped in (fn, jax.checkpoint(fn)):
        made = jax.grad(lambda *given, fn=wrapped: fn(*given)[0].sum(), argnums=(0, 1))(*arrays)
        for result, wanted in zip(made, expected, strict=True):
            close(result, wanted, 1e-5)
