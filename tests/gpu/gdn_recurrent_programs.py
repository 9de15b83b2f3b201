"""The graphs of a few tokens a sequence in the GPU tests of Gated DeltaNet, drawn from the seed of `gdn_programs`, with
every setting of the token-by-token engine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cudnn_jax.engines.planning import pygraph
from gpu.gdn_programs import SEED, options
from gpu.linear_programs import HEADS, drawn_types, one_each
from support.gdn_cases import Case
from support.linear_attention import Sizes

ENGINE = "cutile_gdn_recurrent"
COUNT = 40
_LONGEST = 8
_DTYPES = ("float32", "bfloat16", "float16")


def drawn(rng: np.random.Generator) -> Case:
    lengths = rng.integers(1, _LONGEST + 1, rng.integers(1, 7))
    lengths[1:][rng.random(len(lengths) - 1) < 0.2] = 0
    key_dim, value_dim = (16 * int(rng.integers(1, 17)) for _ in range(2))
    tail = int(rng.integers(0, 2) * rng.integers(1, 40))
    sizes = Sizes((*map(int, lengths),), HEADS[rng.integers(len(HEADS))], key_dim, value_dim, tail)
    dtype = str(rng.choice(_DTYPES))
    pool = int(rng.random() < 0.6) * (len(lengths) + 3)
    started = pool or rng.random() < 0.6
    return Case(
        sizes,
        options(rng),
        **drawn_types(rng, dtype),
        without=() if started else ("initial_state",),
        pool=pool,
        overwrite=bool(started and rng.random() < 0.6),
    )


def cases() -> list[Case]:
    rng = np.random.default_rng(SEED)
    return [drawn(rng) for _ in range(COUNT)]


def programs() -> Iterator[tuple[pygraph, str]]:
    """Every graph with the plan that the test of it asks for."""
    return one_each(cases(), ENGINE)
