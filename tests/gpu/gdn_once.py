"""`python -m gpu.gdn_once`: one small case of each engine of Gated DeltaNet, once, for a sanitizer.

Without TMA: what it moves a sanitizer does not see, and descriptors lie in memory of the driver's that it takes for an
error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cudnn_jax.engines import cutile
from cudnn_jax.engines.planning import pygraph
from gpu import gdn_backward_programs, gdn_programs, gdn_recurrent_programs
from gpu.running import run
from support.gdn_cases import BackwardCase, Case
from support.linear_attention import Options, Sizes

_SIZES = Sizes((70, 0, 64, 3), heads=(2, 1, 4), key_dim=48, value_dim=80, tail=67)
_FEW = Sizes((3, 0, 1, 2), heads=(2, 1, 4), key_dim=48, value_dim=80, tail=5)
_SAFE = Options(use_qk_l2norm=True, safe_gate=True)
_POOL = {"pool": 7, "overwrite": True}
CASES: tuple[tuple[Any, Case], ...] = (
    (gdn_programs, Case(_SIZES, Options(use_qk_l2norm=True, checkpoint_every_n_tokens=64), **_POOL)),
    (gdn_recurrent_programs, Case(_FEW, _SAFE, **_POOL)),
    (gdn_backward_programs, BackwardCase(_SIZES, _SAFE)),
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
        given = case.draw(np.random.default_rng(0))
        for name in engine.implementations(case.graph(given)):
            yield case.graph(given), name


def main() -> int:
    try:
        cutile.available()
        without_tma(pytest.MonkeyPatch())
    except ImportError:
        print("programs that were built elsewhere")
    for engine, case in CASES:
        given = case.draw(np.random.default_rng(0))
        for name in engine.implementations(case.graph(given)):
            graph = case.graph(given)
            made = run(graph, [given[tensor.name] for tensor in graph.inputs], name)
            case.check(graph, [np.asarray(array) for array in made], case.expected(given))
            print(f"{name}: {case}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
