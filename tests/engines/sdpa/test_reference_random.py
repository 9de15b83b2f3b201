"""The reference engine on attention problems drawn at random, against the float64 oracle."""

import functools

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cudnn_jax.engines.sdpa import reference
from support.attention.harness import QUICK, Case, arrays, check, engine_function, engine_ports, expected

pytestmark = pytest.mark.once

AXES = ["", "1NTS", "BNTS", "11TS", "B1TS", "B11S", "1N1S", "BN1S", "BNT1", "11T1", "1111"]


@st.composite
def cases(draw):
    b, t, s = draw(st.integers(1, 3)), draw(st.integers(1, 90)), draw(st.integers(1, 90))
    nk, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    side = st.none() | st.integers(0, 60)
    padded = draw(st.sampled_from(["neither", "queries", "keys", "both"]))
    lengths = {}
    if padded in ("queries", "both"):
        lengths["q_lengths"] = tuple(draw(st.lists(st.integers(0, t), min_size=b, max_size=b)))
    if padded in ("keys", "both"):
        lengths["kv_lengths"] = tuple(draw(st.lists(st.integers(0, s), min_size=b, max_size=b)))
    return Case(
        "random",
        b=b,
        t=t,
        s=s,
        n=nk * group,
        nk=nk,
        d=draw(st.sampled_from([8, 20, 32])),
        dv=draw(st.sampled_from([0, 12, 40])),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        causal=draw(st.booleans()),
        alignment=draw(st.sampled_from(["top_left", "bottom_right"])),
        window=draw(st.none() | st.tuples(side, side)),
        bias=draw(st.sampled_from(AXES)),
        bias_dtype=draw(st.sampled_from(["", "float32"])),
        bias_shift=draw(st.sampled_from([0.0, -100.0])),
        mask=draw(st.sampled_from(AXES)),
        poison=draw(st.booleans()),
        d_lse=draw(st.booleans()),
        **lengths,
    )


@settings(max_examples=8, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(), rows=st.integers(5, 100), keys=st.integers(5, 100))
def test_any_combination(case, rows, keys):
    tiles = {"tiles": (rows, keys)}
    both = engine_function(
        case, functools.partial(reference.forward, **tiles), functools.partial(reference.backward, **tiles)
    )
    inputs = arrays(case)
    got = jax.jit(both, compiler_options=QUICK)(engine_ports(case, inputs))
    check(case, got, expected(case, inputs))
