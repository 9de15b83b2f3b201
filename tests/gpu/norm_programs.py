"""The RMS norm graphs of the GPU tests, with every setting of the cuTile engine for an H200.

The settings are computed without a DSL, so a machine that has none can name the programs that were built elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from cudnn_jax.engines.base import PlanConfig
from cudnn_jax.engines.norm import facts, rmsnorm_tiles
from cudnn_jax.engines.planning import pygraph
from support.norms import Case

ENGINE = "cutile_rmsnorm"
SM_COUNT = 132

CASES = [
    Case((4099, 4096), (1,), "bfloat16"),
    Case((4099, 4096), (1,), "float16", "float32", bias=True),
    Case((1000, 4096), (1,), "float32", bias=True),
    Case((1, 4096), (1,), "bfloat16", bias=True),
    Case((4097, 5120), (1,), "bfloat16"),
    Case((513, 8192), (1,), "bfloat16", bias=True),
    Case((300, 16384), (1,), "bfloat16"),
    Case((300, 16384), (1,), "float16", statistics=False),
    Case((300, 12288), (1,), "bfloat16", bias=True),
    Case((1025, 7168), (1,), "bfloat16"),
    Case((301, 9000), (1,), "bfloat16", bias=True),
    Case((4097, 512), (1,), "bfloat16"),
    Case((300, 12288), (1,), "float32", bias=True),
    Case((70001, 128), (1,), "bfloat16", bias=True),
    Case((30011, 96), (1,), "float16"),
    Case((3001, 1001), (1,), "bfloat16", bias=True),
    Case((3001, 1001), (1,), "float32"),
    Case((777, 5), (1,), "bfloat16", bias=True),
    Case((777, 1), (1,), "float32", bias=True),
    Case((64, 8, 33, 130), (2, 3), "bfloat16", bias=True),
    Case((64, 8, 130), (1, 2), "float16", scale=False, bias=True),
    Case((2049, 2048), (1,), "bfloat16", scale=False),
]
WIDE = Case((600_000, 4096), (1,), "bfloat16")
"""More than 2^31 elements."""


def implementations(graph: pygraph) -> list[str]:
    """The names of the engine's plans, the predicted best first."""
    graph.freeze()
    found = rmsnorm_tiles.settings(facts.analyze(graph), SM_COUNT)
    return [PlanConfig(0, knobs, engine=ENGINE).name for knobs in found]


def programs() -> Iterator[tuple[pygraph, str]]:
    """Every graph with every plan that a test or a benchmark asks for by name."""
    for case in CASES:
        for direction in ("forward", "backward"):
            graph = getattr(case, direction)()
            for name in implementations(graph):
                yield getattr(case, direction)(), name
    for direction in ("forward", "backward"):
        graph = getattr(WIDE, direction)()
        yield getattr(WIDE, direction)(), implementations(graph)[0]
