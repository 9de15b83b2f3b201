"""The reference engine on every attention case, against the float64 oracle."""

import functools

import jax
import pytest

from cudnn_jax.engines.sdpa import reference
from support.attention.harness import BY_NAME, CASES, QUICK, arrays, check, engine_function, engine_ports, expected

SMALL_TILES = (24, 40)
"""Rows and keys of a tile that cut even short cases into several blocks, ragged ones among them."""

WHOLE = ["decode", "gqa_bf16", "mask_bias_causal"]


def run(case, tiles, compiler_options=None):
    forward = functools.partial(reference.forward, tiles=tiles)
    backward = functools.partial(reference.backward, tiles=tiles)
    given = arrays(case)
    both = jax.jit(engine_function(case, forward, backward), compiler_options=compiler_options)
    check(case, both(engine_ports(case, given)), expected(case, given))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_many_tiles(case):
    run(case, SMALL_TILES, QUICK)


@pytest.mark.parametrize("name", WHOLE)
def test_in_the_tiles_it_chooses(name):
    run(BY_NAME[name], None)
