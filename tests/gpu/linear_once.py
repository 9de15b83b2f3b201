"""`python -m gpu.linear_once`: one small case of each kernel of linear attention, once, for a sanitizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from cudnn_jax.engines.planning import pygraph
from gpu.linear_programs import all_of, graph_of, implementations
from gpu.running import run
from gpu.sanitized import as_asked
from support.gdn_cases import BackwardCase, Case
from support.linear_attention import Options, Sizes

_SIZES = Sizes((70, 0, 64, 3), heads=(2, 1, 4), key_dim=48, value_dim=80, tail=67)
_FEW = Sizes((3, 0, 1, 2), heads=(2, 1, 4), key_dim=48, value_dim=80, tail=5)
_SAFE = Options(use_qk_l2norm=True, safe_gate=True)
_POOL = {"pool": 7, "overwrite": True}
CASES: tuple[tuple[str, Case], ...] = (
    ("cutile_gdn", Case(_SIZES, Options(use_qk_l2norm=True, checkpoint_every_n_tokens=64), **_POOL)),
    ("cutile_gdn_recurrent", Case(_FEW, _SAFE, **_POOL)),
    ("cutile_gdn", BackwardCase(_SIZES, _SAFE)),
    *(
        (f"cutile_{operation}", kind(_SIZES, options, operation=operation))
        for operation in ("kda", "gdn2")
        for kind, options in ((Case, Options(use_qk_l2norm=True)), (BackwardCase, _SAFE))
    ),
    *((f"cutile_{operation}_recurrent", Case(_FEW, _SAFE, operation=operation)) for operation in ("kda", "gdn2")),
)


def programs() -> Iterator[tuple[pygraph, str]]:
    """Every graph with every plan."""
    for engine, case in CASES:
        yield from all_of([case], engine)


def main() -> int:
    as_asked()
    for engine, case in CASES:
        given = case.draw(np.random.default_rng(0))
        for name in implementations(case, engine):
            graph = graph_of(case)
            made = run(graph, [given[tensor.name] for tensor in graph.inputs], name)
            case.check(graph, [np.asarray(array) for array in made], case.expected(given), given)
            print(f"{name}: {case}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
