"""The reference engine as a program: memory, size, determinism, and life inside JAX's transformations."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from cudnn_jax.engines.sdpa import reference
from support.attention.harness import BY_NAME, QUICK, Case, arrays, check, engine_function, engine_ports, expected

SMALL = functools.partial(reference.forward, tiles=(24, 40)), functools.partial(reference.backward, tiles=(24, 40))
MEGABYTE = 2**20


def shapes(case):
    small = dataclasses.replace(case, t=1, s=1)
    sizes = {
        "q": (case.t, case.d),
        "k": (case.s, case.d),
        "v": (case.s, case.value_dim),
        "dO": (case.t, case.value_dim),
    }
    sizes |= {
        name: case.shape_of(letters)[2:] for name, letters in (("bias", case.bias), ("mask", case.mask)) if letters
    }
    ports = engine_ports(small, arrays(small)).items()
    return {name: jax.ShapeDtypeStruct((*x.shape[:2], *sizes.get(name, x.shape[2:])), x.dtype) for name, x in ports}


def jitted(case):
    return jax.jit(engine_function(case, *SMALL), compiler_options=QUICK)


def lowered(case):
    return jax.jit(engine_function(case, reference.forward, reference.backward)).lower(shapes(case))


LONG = Case("long", b=1, t=8192, s=8192, n=2, nk=1, d=64, dtype="bfloat16")
"""One (T, S) array of it takes 256 MB in float32, 64 MB as booleans."""


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"dtype": "float32", "window": (100, 100), "bias": "1N1S"},
        {"causal": True, "alignment": "bottom_right", "kv_lengths": (8000,), "mask": "B11S"},
    ],
    ids=["causal", "window_bias", "lengths_mask"],
)
def test_scratch_memory_is_linear_in_the_length(options):
    temporary = lowered(dataclasses.replace(LONG, **options)).compile(QUICK).memory_analysis().temp_size_in_bytes
    assert temporary < 48 * MEGABYTE


def test_a_bias_is_not_broadcast_over_batch_and_heads():
    case = Case("wide", b=4, n=8, nk=8, t=1024, s=1024, d=32, bias="11TS", mask="1NTS")
    memory = lowered(case).compile(QUICK).memory_analysis()
    broadcast = 4 * 8 * 1024 * 1024 * 4
    assert memory.output_size_in_bytes < broadcast / 2
    assert memory.temp_size_in_bytes < broadcast / 2


def test_the_program_does_not_grow_with_the_length():
    def lines(length):
        return lowered(dataclasses.replace(LONG, t=length, s=length, causal=True)).as_text().count("\n")

    assert lines(65536) == lines(4096)


def test_a_short_problem_has_no_loop():
    for case in (Case("small", t=64, s=64, causal=True), Case("decode", t=1, s=4096, d=64, kv_lengths=(9, 4096))):
        assert "stablehlo.while" not in lowered(case).as_text()


@pytest.mark.parametrize("name", ["gqa_bf16", "bias_11TS", "lengths"])
def test_two_runs_agree_bit_for_bit(name):
    case = BY_NAME[name]
    both, ports = jitted(case), engine_ports(case, arrays(case))
    first = jax.tree.map(np.asarray, both(ports))
    for key, again in both(ports).items():
        np.testing.assert_array_equal(first[key].view(np.uint8), np.asarray(again).view(np.uint8), err_msg=key)


@pytest.mark.parametrize("name", ["lengths", "mask_bias_causal", "gqa_bf16"])
def test_inside_shard_map(name):
    case = dataclasses.replace(BY_NAME[name], b=4)
    if case.q_lengths:
        case = dataclasses.replace(case, q_lengths=(97, 0, 3, 50), kv_lengths=(64, 97, 0, 20))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    inputs = arrays(case)
    ports = engine_ports(case, inputs)
    split = {name: P("data") if x.shape[0] == 4 else P() for name, x in ports.items()}
    outputs = ["o", "lse", "d_query", "d_key", "d_value"] + ["d_bias"] * bool(case.bias)
    local = engine_function(dataclasses.replace(case, b=2), *SMALL)

    def per_device(ports):
        got = local(ports)
        if "d_bias" in got and case.bias[0] == "1":
            got["d_bias"] = jax.lax.psum(got["d_bias"], "data")
        return got

    results = {key: P() if key == "d_bias" and case.bias[0] == "1" else P("data") for key in outputs}
    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(split,), out_specs=results)
    with jax.set_mesh(mesh):
        placed = {key: jax.device_put(x, jax.NamedSharding(mesh, split[key])) for key, x in ports.items()}
        got = jax.jit(sharded, compiler_options=QUICK)(placed)
    check(case, got, expected(case, inputs))


def test_inside_vmap():
    case = BY_NAME["bottom_right_lengths"]
    many = [arrays(case) for _ in range(3)]
    many[2] = many[2] | {"query": many[2]["query"] * 2}
    stacked = jax.tree.map(lambda *each: np.stack(each), *(engine_ports(case, one) for one in many))
    lengths = stacked["seq_len_kv"].copy()
    lengths[1] -= 20
    got = jax.jit(jax.vmap(engine_function(case, *SMALL)), compiler_options=QUICK)(stacked | {"seq_len_kv": lengths})
    for index, one in enumerate(many):
        kv_lengths = tuple(int(n) for n in lengths[index].ravel())
        this = dataclasses.replace(case, kv_lengths=kv_lengths)
        check(this, {key: x[index] for key, x in got.items()}, expected(this, one))


def test_float64_in_64_bit_mode():
    case = BY_NAME["bias_11TS"]
    inputs = {name: x.astype(np.float64) for name, x in arrays(case).items()}
    with jax.enable_x64(True):
        got = jitted(case)(engine_ports(case, inputs))
        assert {key: x.dtype.name for key, x in got.items() if x.dtype != np.float64} == {"lse": "float32"}
        want = expected(case, inputs)
        np.testing.assert_allclose(got["o"], want.o, atol=1e-12)
        # The float32 logsumexp is what the gradients start from.
        check(case, got, want)


def test_float32_in_64_bit_mode():
    case = BY_NAME["window_bottom_right_lengths"]
    inputs = arrays(case)
    with jax.enable_x64(True):
        got = jitted(case)(engine_ports(case, inputs))
        assert {x.dtype.name for x in got.values()} == {"float32"}
        check(case, got, expected(case, inputs))


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_masked_out_keys_and_biases_may_hold_anything(garbage):
    case = Case("hidden", t=50, s=90, mask="B11S", bias="BNTS", full_mask=True, d_lse=True)
    inputs = arrays(case)
    inputs["mask"] = np.arange(90)[None, None, None] < np.array([60, 0])[:, None, None, None]
    clean = expected(case, inputs)
    hidden = ~np.broadcast_to(inputs["mask"], inputs["bias"].shape)
    inputs["bias"][hidden] = garbage
    for name in ("key", "value"):
        inputs[name][~inputs["mask"][:, 0, 0]] = garbage
    check(case, jitted(case)(engine_ports(case, inputs)), clean)


def test_rows_that_see_nothing_are_zero_even_among_garbage():
    case = Case("blind", t=50, s=90, mask="11TS", full_mask=True)
    inputs = arrays(case)
    inputs["mask"][:, :, 7] = False
    inputs["value"][:, 3] = np.nan
    got = jitted(case)(engine_ports(case, inputs))
    assert not np.asarray(got["o"])[:, 7].any()
    assert np.isneginf(np.asarray(got["lse"])[:, 7]).all()
    assert not np.asarray(got["d_query"])[:, 7].any()


def test_a_nan_that_is_attended_to_shows():
    case = Case("seen", t=50, s=90, causal=True)
    inputs = arrays(case)
    inputs["key"][:, 20] = np.nan
    o = np.asarray(jitted(case)(engine_ports(case, inputs))["o"])
    assert np.isnan(o[:, 20:]).all()
    assert not np.isnan(o[:, :20]).any()


def test_a_bias_of_minus_infinity_hides_a_key():
    case = Case("hides", bias="B11S")
    inputs = arrays(case)
    inputs["bias"][..., 60:] = -np.inf
    inputs["bias"][1] = -np.inf
    got = jitted(case)(engine_ports(case, inputs))
    masked = dataclasses.replace(case, bias="", mask="B11S")
    kept = np.isfinite(inputs["bias"])
    bias = np.where(kept, inputs["bias"], 0)
    want = expected(masked, inputs | {"mask": kept, "bias": bias})
    check(case, got, want)


def test_tiles_follow_the_platform():
    case = dataclasses.replace(LONG, causal=True, n=1)
    text = {name: re.sub(r"loc\(.*", "", _text(case, name)) for name in ("cpu", "cuda")}
    assert text["cpu"] != text["cuda"]


def _text(case, platform):
    make = (functools.partial(each, platform=platform) for each in (reference.forward, reference.backward))
    return jax.jit(engine_function(case, *make)).lower(shapes(case)).as_text()
