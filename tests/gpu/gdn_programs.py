"""The Gated DeltaNet graphs of the GPU tests, drawn from a seed, with every setting of the cuTile engine for an H200.

`CUDNN_JAX_GDN_CASES` names the seed: programs that were built elsewhere serve a run of the same one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.linear_attention import settings
from cudnn_jax.engines.base import PlanConfig
from cudnn_jax.engines.linear_attention.facts import analyze
from cudnn_jax.engines.planning import pygraph
from gpu.linear_programs import HEADS, TARGET, drawn_types, one_each
from support.gdn_cases import Case
from support.linear_attention import Options, Sizes

ENGINE = "cutile_gdn"
SEED = int(os.environ.get("CUDNN_JAX_GDN_CASES", "0"))
COUNT = 64

_DIMS = ((128, 128), (64, 64), (128, 96), (48, 144), (256, 256), (16, 16), (192, 64))
_EVERY = (0, 0, 64, 128)


def options(rng: np.random.Generator, every: Sequence[int] = (0,)) -> Options:
    """Any options, with checkpoints after one of `every`."""
    safe = bool(rng.random() < 0.3)
    sigmoid = bool(rng.random() < 0.4)
    return Options(
        use_qk_l2norm=bool(rng.random() < 0.7),
        use_beta_sigmoid=sigmoid,
        allow_neg_eigval=sigmoid and bool(rng.random() < 0.5),
        safe_gate=safe,
        gate_domain="linear" if not safe and rng.random() < 0.3 else "log",
        checkpoint_every_n_tokens=int(rng.choice(every)),
    )


def _lengths(rng: np.random.Generator) -> tuple[int, ...]:
    lengths = rng.integers(0, 400, rng.integers(1, 6))
    lengths[rng.random(len(lengths)) < 0.2] = 0
    lengths[rng.random(len(lengths)) < 0.2] //= 64
    return (*map(int, lengths), int(rng.integers(1, 700)))


def drawn(rng: np.random.Generator) -> Case:
    key_dim, value_dim = _DIMS[rng.integers(len(_DIMS))]
    heads = HEADS[rng.integers(len(HEADS))]
    sizes = Sizes(_lengths(rng), heads, key_dim, value_dim, tail=int(rng.integers(0, 2) * rng.integers(1, 200)))
    dtype = str(rng.choice(["bfloat16", "float16"]))
    pool = int(rng.random() < 0.3) * (len(sizes.lengths) + 3)
    return Case(
        sizes,
        options(rng, _EVERY),
        **drawn_types(rng, dtype),
        without=() if pool or rng.random() < 0.5 else ("initial_state",),
        pool=pool,
        overwrite=bool(pool and rng.random() < 0.5),
    )


def cases() -> list[Case]:
    rng = np.random.default_rng(SEED)
    return [drawn(rng) for _ in range(COUNT)]


MANY, TIMES = (
    Case(Sizes((66 * 64,), (4, 4, 4), 128, 128), Options(use_qk_l2norm=True), without=("initial_state",)),
    1024,
)
"""A sequence, and how often it is packed for more chunks than a grid's second axis has, and offsets beyond 2^31."""


def repeated(case: Case, times: int) -> pygraph:
    """The graph of so many sequences like the case's."""
    graph = pygraph(io_data_type=case.dtype)
    rows = {"cu_seqlens": times + 1}
    tensors = {
        name: graph.tensor((rows.get(name, times * len(x)), *x.shape[1:]), data_type=x.dtype.name, name=name)
        for name, x in case.draw(np.random.default_rng(0)).items()
    }
    for tensor in graph.gdn(**tensors, **case.options.attributes(), output_final_state=True)[:2]:
        tensor.set_output(True)
    return graph


def programs() -> Iterator[tuple[pygraph, str]]:
    """Every graph with the plan that the test of it asks for."""
    yield from one_each(cases(), ENGINE)
    yield many()


def many() -> tuple[pygraph, str]:
    """The packed graph with its plan."""
    graph = repeated(MANY, TIMES)
    graph.freeze()
    return repeated(MANY, TIMES), PlanConfig(0, settings(analyze(graph), TARGET)[ENGINE][0], engine=ENGINE).name
