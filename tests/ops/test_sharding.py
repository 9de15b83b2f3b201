"""Operations over a mesh of 8 devices: the results of one device, and batch and heads split without communication."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cudnn_jax
from support import linear_attention as oracle
from support.attention.harness import QUICK
from support.over_devices import SUM, communication

if jax.device_count() < 8:
    pytest.skip("needs 8 devices; tests/conftest.py asks XLA for them on a CPU", allow_module_level=True)

Arrays = dict[str, jax.Array]
Function = Callable[[Arrays], Any]


def mesh_of(kind: AxisType = AxisType.Auto, sizes: tuple[int, ...] = (2, 4)) -> jax.sharding.Mesh:
    return jax.make_mesh(sizes, ("data", "model")[: len(sizes)], axis_types=(kind,) * len(sizes))


MESH = mesh_of()
B, T, S, N, NK, D = 8, 4, 3, 8, 4, 4
ATTENTION = {
    "query": (B, T, N, D),
    "key": (B, S, NK, D),
    "value": (B, S, NK, D),
    "bias": (1, N, T, S),
    "mask": (B, 1, 1, S),
    "key_value_seq_lengths": (B,),
    "weight": (B, T, N, D),
}
DELTA = {
    "q": (B, T, 4, D),
    "k": (B, T, 4, D),
    "v": (B, T, 8, 3),
    "g": (B, T, 8),
    "beta": (B, T, 8),
    "initial_state": (B, 8, 3, D),
    "a_log": (8,),
    "dt_bias": (8,),
    "weight": (B, T, 8, 3),
}
PACKED = {
    "q": (B * T, 4, D),
    "k": (B * T, 4, D),
    "v": (B * T, 8, 3),
    "g": (B * T, 8, D),
    "beta": (B * T, 8, D),
    "w": (B * T, 8, 3),
    "initial_state": (3, 8, 3, D),
    "a_log": (8,),
    "dt_bias": (8, D),
    "cu_seqlens": (4,),
    "weight": (B * T, 8, 3),
}


def draw(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    made = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    if "mask" in made:
        made["mask"] = made["mask"] > -1
    if "key_value_seq_lengths" in made:
        made["key_value_seq_lengths"] = jnp.arange(B, dtype=jnp.int32) % (S + 1)
    if "cu_seqlens" in made:
        made["cu_seqlens"] = jnp.array([0, 5, 5, B * T - 2], jnp.int32)
    return made


def weighted(weight: jax.Array, out: jax.Array, more: jax.Array) -> jax.Array:
    return (weight * out).sum() + (jnp.where(jnp.isfinite(more), more, 0) ** 2).sum()


def attend(given: Arrays) -> jax.Array:
    operands = {name: x for name, x in given.items() if name != "weight"}
    return weighted(given["weight"], *cudnn_jax.sdpa(**operands, is_causal=True, return_residual=True))


OPTIONS = {"use_qk_l2norm": True, "use_beta_sigmoid": True, "safe_gate": True}


def recur(operation: Callable[..., Any], given: Arrays) -> jax.Array:
    operands = {name: x for name, x in given.items() if name != "weight"}
    return weighted(
        given["weight"],
        *operation(**operands, **OPTIONS, output_final_state=True),
    )


GDN, GDN2 = (functools.partial(recur, operation) for operation in (cudnn_jax.gdn, cudnn_jax.gdn2))


def gradients(loss: Function) -> Function:
    def run(given: Arrays) -> Any:
        moving = {name: x for name, x in given.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        return jax.value_and_grad(lambda moving: loss(given | moving))(moving)

    return run


@functools.cache
def _expected(loss: Function, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> Any:
    given = draw(dict(shapes))
    return run(gradients(loss), given)[0] if loss is attend else by_oracle(given)


def expected(loss: Function, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """The loss and its gradients: of attention on one device, of the others by the oracle, which compiles nothing."""
    return _expected(loss, tuple(shapes.items()))


def by_oracle(given: Arrays) -> Any:
    rows = {name: np.asarray(x) for name, x in given.items()}
    if "cu_seqlens" not in given:
        rows = {name: x.reshape(-1, *x.shape[2:]) if x.shape[:2] == (B, T) else x for name, x in rows.items()}
        rows["cu_seqlens"] = np.arange(B + 1) * T
    weight, options = rows.pop("weight"), oracle.Options(**OPTIONS)
    made = oracle.forward(rows, options)
    value = (weight * made["O"]).sum() + (made["final_state"] ** 2).sum()
    grads = oracle.backward(rows, weight, 2 * made["final_state"], options) | {"weight": made["O"]}
    return value, {name: grads[name].reshape(x.shape) for name, x in given.items() if name in grads}


def close(got: Any, want: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-5), got, want)


def place(given: Arrays, specs: Mapping[str, P], mesh: jax.sharding.Mesh = MESH) -> Arrays:
    return {name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) for name, x in given.items()}


def run(fn: Function, *given: Any) -> tuple[Any, str]:
    compiled = jax.jit(fn).lower(*given).compile(QUICK)
    return compiled(*given), compiled.as_text()


def attention_specs(batch: Any, heads: Any, kv_heads: Any = ...) -> dict[str, P]:
    kv = P(batch, None, heads if kv_heads is ... else kv_heads)
    return {
        "query": P(batch, None, heads),
        "weight": P(batch, None, heads),
        "key": kv,
        "value": kv,
        "bias": P(None, heads),
        "mask": P(batch),
        "key_value_seq_lengths": P(batch),
    }


def delta_specs(batch: Any, heads: Any) -> dict[str, P]:
    tokens = dict.fromkeys(("q", "k", "v", "g", "beta", "weight"), P(batch, None, heads))
    return tokens | {"initial_state": P(batch, heads), "a_log": P(heads), "dt_bias": P(heads)}


def packed_specs(heads: Any) -> dict[str, P]:
    tokens = dict.fromkeys(("q", "k", "v", "g", "beta", "w", "weight"), P(None, heads))
    return tokens | {"initial_state": P(None, heads), "a_log": P(heads), "dt_bias": P(heads)}


CASES = {
    "sdpa over batch": (attend, ATTENTION, attention_specs(("data", "model"), None), {SUM}),
    "sdpa over heads": (attend, ATTENTION, attention_specs(None, "model"), set()),
    "sdpa over both": (attend, ATTENTION, attention_specs("model", "data"), {SUM}),
    "sdpa, one key head": (
        attend,
        ATTENTION | {"key": (B, S, 1, D), "value": (B, S, 1, D)},
        attention_specs("data", "model", None),
        {SUM},
    ),
    # Each device's query heads read one of two key heads, whose gradients are wanted on all devices.
    "sdpa, fewer key heads than parts": (
        attend,
        ATTENTION | {"key": (B, S, 2, D), "value": (B, S, 2, D)},
        attention_specs("data", "model", None),
        {SUM, "all-gather"},
    ),
    "gdn over both": (GDN, DELTA, delta_specs("model", "data"), {SUM}),
    "gdn2 packed": (GDN2, PACKED, packed_specs("model"), set()),
}


@pytest.mark.parametrize("case", CASES)
def test_batch_and_heads_split_without_moving_anything(case: str) -> None:
    """Gradients of operands that several devices read are summed, and gathered where all are to have them."""
    loss, shapes, specs, expected_communication = CASES[case]
    got, text = run(gradients(loss), place(draw(shapes), specs))
    close(got, expected(loss, shapes))
    # The loss itself is a sum.
    assert communication(text) == expected_communication | {SUM}
    for name, gradient in got[1].items():
        assert gradient.sharding.is_equivalent_to(NamedSharding(MESH, specs.get(name, P())), gradient.ndim), name


@pytest.mark.parametrize("case", ["sdpa over both", "sdpa, one key head", "gdn2 packed"])
def test_explicit_axes(case: str) -> None:
    loss, shapes, specs, _ = CASES[case]
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        got, text = run(gradients(loss), place(draw(shapes), specs, mesh))
    close(got, expected(loss, shapes))
    assert communication(text) == {SUM}


def plain(batch: int = B, heads: int = N, length: int = T) -> Arrays:
    return draw(dict.fromkeys(("query", "key", "value"), (batch, length, heads, D)))


def out_of(given: Arrays) -> jax.Array:
    return cudnn_jax.sdpa(**given, is_causal=True)


@pytest.mark.parametrize("given", [plain(), plain(batch=7), plain(heads=6)], ids=["even", "batch 7", "heads 6"])
def test_constraints_inside_of_the_function(given: Arrays) -> None:
    """What does not divide by the mesh is not split."""
    split = NamedSharding(MESH, P("model", None, "data"))

    def constrained(given: Arrays) -> jax.Array:
        return out_of(jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, split), given))

    got, text = run(constrained, given)
    close(got, out_of(given))
    if given["query"].shape == (B, T, N, D):
        assert communication(text) == set()


def test_split_tokens_are_gathered() -> None:
    given = plain()
    got, text = run(out_of, place(given, {"query": P("data", "model"), "key": P("data", "model")}))
    close(got, out_of(given))
    assert "all-gather" in communication(text)


def test_shardings_of_the_jit_alone() -> None:
    split = NamedSharding(MESH, P("data", None, "model"))
    fn = jax.jit(out_of, in_shardings=({name: split for name in plain()},), out_shardings=split)
    compiled = fn.lower(plain()).compile(QUICK)
    assert communication(compiled.as_text()) == set()
    close(compiled(plain()), out_of(plain()))


def test_inside_of_scan_remat_and_vmap() -> None:
    def layers(given: Arrays) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + out_of(given | {"query": x}), None

        return (jax.lax.scan(layer, given["query"], None, length=2)[0] ** 2).sum()

    def both(given: Arrays) -> Any:
        return jax.vmap(jax.grad(layers))(jax.tree.map(lambda x: x.reshape(2, B // 2, *x.shape[1:]), given))

    got, _ = run(both, place(plain(), dict.fromkeys(plain(), P("model", None, "data"))))
    close(got, run(both, plain())[0])


def test_partly_manual_shard_map() -> None:
    """Batch is split by the caller, heads by XLA."""
    loss, shapes, specs, _ = CASES["sdpa over both"]
    manual = {name: P(*(each if each == "model" else None for each in specs[name])) for name in shapes}

    def mapped(given: Arrays) -> Any:
        value, grads = gradients(loss)(given)
        return jax.lax.psum(value, "model"), grads

    split = jax.shard_map(
        mapped,
        mesh=MESH,
        in_specs=(manual,),
        out_specs=(P(), {name: manual[name] for name in expected(loss, shapes)[1]}),
        axis_names={"model"},
    )
    got, text = run(split, place(draw(shapes), specs))
    close(got, expected(loss, shapes))
    assert communication(text) == {SUM}


def test_a_pool_of_states_splits_over_heads() -> None:
    tokens = draw({name: (2, *DELTA[name][2:]) for name in ("q", "k", "v", "g", "beta")})
    state = draw({"state": (6, 8, 3, D)})["state"]
    indices = jnp.array([3, 1], jnp.int32)

    def step(tokens: Arrays, state: jax.Array) -> Any:
        return cudnn_jax.gdn_step(**tokens, state=state, state_indices=indices, use_beta_sigmoid=True, safe_gate=True)

    placed = place(tokens, dict.fromkeys(tokens, P(None, "model")))
    got, text = run(step, placed, jax.device_put(state, NamedSharding(MESH, P("data", "model"))))
    close(got, step(tokens, state))
    assert got[1].sharding.spec == P(None, "model")
    # Any row may be a sequence's: those of other devices are fetched.
    assert communication(text) == {"all-gather"}


def test_explain_tells_the_share_of_one_device() -> None:
    loss, shapes, specs, _ = CASES["sdpa over both"]
    told = cudnn_jax.explain(gradients(loss), place(draw(shapes), specs))
    assert [(row["operation"], row["count"]) for row in told.rows] == [("sdpa_fwd", 1), ("sdpa_bwd", 1)]
    for row in told.rows:
        assert f"B{B // 4}" in row["facts"] and f"{N // 2}" in row["facts"]
        assert "one device" in row["notes"][-1]
    again = cudnn_jax.explain(jax.jit(gradients(loss)), place(draw(shapes), specs))
    assert again == told


def test_exporting_it_is_refused() -> None:
    placed = place(plain(), dict.fromkeys(plain(), P("data")))
    with pytest.raises(NotImplementedError, match="sdpa_fwd cannot be exported .* over 8 devices: .* jax.shard_map"):
        jax.export.export(jax.jit(out_of))(placed)
    mapped = jax.shard_map(out_of, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    exported = jax.export.export(jax.jit(mapped))(placed)
    close(exported.call(placed), out_of(plain()))


def test_programs_for_a_gpu_that_is_not_here_are_for_the_share_of_one_device() -> None:
    """Also over a mesh of devices that are not here."""
    absent = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def described(mesh: Any) -> list[jax.ShapeDtypeStruct]:
        split = NamedSharding(mesh, P("data", None, "model"))
        return [jax.ShapeDtypeStruct((B, T, N, D), jnp.bfloat16, sharding=split)] * 3

    with cudnn_jax.aot.target("h200"):
        (row,) = cudnn_jax.explain(cudnn_jax.sdpa, *described(MESH)).rows
        lowered = jax.jit(cudnn_jax.sdpa).trace(*described(absent)).lower(lowering_platforms=("cuda",))
    assert f"B{B // 2} " in row["facts"] and f"heads {N // 4}/{N // 4}" in row["facts"]
    assert len(re.findall(r"CustomSPMDPartitioning.*sdpa_fwd.*H200.*sdy\.sharding_rule", lowered.as_text())) == 1
