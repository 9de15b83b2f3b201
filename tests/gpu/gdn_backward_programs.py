"""The Gated DeltaNet backwards of the GPU tests, with every setting of the cuTile engine for an H200: chosen ones, and
some drawn from the seed of `gdn_programs`.

The settings are computed without a DSL, so a machine that has none can name the programs that were built elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cudnn_jax.engines.planning import pygraph
from gpu.gdn_programs import SEED, options
from gpu.linear_programs import HEADS, all_of, drawn_types
from support.gdn_cases import BackwardCase
from support.linear_attention import Options, Sizes

ENGINE = "cutile_gdn"

NORMAL = Options(use_qk_l2norm=True)
PACKED = Sizes((200, 0, 64, 1, 130), key_dim=128, value_dim=128, tail=67)
SHARED = Sizes((129, 0, 70), heads=(2, 1, 4), key_dim=96, value_dim=160)
VALUES = Sizes((150,), heads=(4, 4, 1), key_dim=256, value_dim=256, tail=1)
ONE = Sizes((300,), key_dim=128, value_dim=128)

_DIMS = ((128, 128), (64, 64), (16, 48), (192, 64), (256, 256))
DRAWN = 24


def drawn(rng: np.random.Generator) -> BackwardCase:
    key_dim, value_dim = _DIMS[rng.integers(len(_DIMS))]
    lengths = rng.integers(0, 300, rng.integers(1, 5))
    lengths[rng.random(len(lengths)) < 0.2] = 0
    tail = int(rng.integers(0, 2) * rng.integers(1, 100))
    sizes = Sizes((*map(int, lengths), 77), HEADS[rng.integers(len(HEADS))], key_dim, value_dim, tail)
    dtype = str(rng.choice(["bfloat16", "float16"]))
    return BackwardCase(
        sizes,
        options(rng),
        **drawn_types(rng, dtype),
        without=() if rng.random() < 0.5 else ("initial_state",),
        final=bool(rng.random() < 0.5),
    )


def cases() -> list[BackwardCase]:
    rng = np.random.default_rng(SEED)
    return [*CHOSEN, *(drawn(rng) for _ in range(DRAWN))]


CHOSEN = [
    BackwardCase(PACKED, NORMAL),
    BackwardCase(PACKED, Options(), dtype="float16", gates="float16", without=("initial_state",)),
    BackwardCase(SHARED, Options(use_qk_l2norm=True, use_beta_sigmoid=True, safe_gate=True)),
    BackwardCase(SHARED, Options(use_beta_sigmoid=True, allow_neg_eigval=True, gate_domain="linear"), state="bfloat16"),
    BackwardCase(VALUES, NORMAL),
    BackwardCase(Sizes((65, 3), key_dim=16, value_dim=16), Options(safe_gate=True), without=("a_log",), final=False),
    *(BackwardCase(ONE, NORMAL, kind=kind) for kind in ("strong", "reset", "correlated", "unwritten", "zero_keys")),
]


def programs() -> Iterator[tuple[pygraph, str]]:
    """Every graph with every plan that a test asks for by name."""
    return all_of(cases(), ENGINE)
