"""`python -m gpu.linear_once`: one small case of each kernel of linear attention, once, for a sanitizer.

Without TMA: what it moves a sanitizer does not see, and descriptors lie in memory of the driver's that it takes for an
error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

from cudnn_jax.engines import cutile
from cudnn_jax.engines.planning import pygraph
from gpu.linear_programs import all_of, graph_of, implementations
from gpu.running import run
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


def without_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are compiled from now on load and store with plain instructions."""
    from cuda.tile import _ir2bytecode

    usual = _ir2bytecode.BytecodeContext.load_store_hints
    plain = lambda self, latency, allow_tma: usual(self, latency, False)  # noqa: E731
    monkeypatch.setattr(_ir2bytecode.BytecodeContext, "load_store_hints", plain)
    cutile._compile.cache_clear()


def programs() -> Iterator[tuple[pygraph, str]]:
    """Every graph with every plan, to be built under `without_tma`."""
    for engine, case in CASES:
        yield from all_of([case], engine)


def main() -> int:
    try:
        cutile.available()
        without_tma(pytest.MonkeyPatch())
    except ImportError:
        print("programs that were built elsewhere")
    for engine, case in CASES:
        given = case.draw(np.random.default_rng(0))
        for name in implementations(case, engine):
            graph = graph_of(case)
            made = run(graph, [given[tensor.name] for tensor in graph.inputs], name)
            case.check(graph, [np.asarray(array) for array in made], case.expected(given))
            print(f"{name}: {case}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
