"""The bias-GELU graphs of the GPU tests, with every setting of the CuTe-DSL engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cudnn_jax.engines import planning
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.pointwise import samples
from cudnn_jax.engines.target import Target

ENGINE = "cutedsl_bias_gelu"
DTYPES = ("bfloat16", "float16", "float32")
# Rows, cols: whole vectors and not, one row, one column, less than a vector, more slabs than rows, empty multiprocessors
SHAPES = ((512, 4096), (1023, 1001), (257, 8), (1, 1), (1, 4096), (4097, 1), (3, 2), (8, 65536), (2048, 5120))
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"approximation": "tanh"},
    {"pre": True},
    {"bias": False},
    {"residual": False, "pre": True, "approximation": "tanh"},
    {"bias": False, "residual": False},
)
SETTING_SHAPES = ((2048, 4096), (1023, 1001))
TAILS = {"bfloat16": (64, 1024), "float16": (64, 1024), "float32": (64, 16384)}
WIDE = (2**17 + 3, 2**14 + 8)
"""More than 2^31 elements."""


def setting_names(graph: pygraph, target: Target) -> list[str]:
    """The engine's plans for a graph, as they were ranked, here or where its programs were built."""
    return [plan.name for plan in planning.plan(graph, target).plans if plan.engine == ENGINE]


def tail_graphs() -> Iterator[pygraph]:
    for dtype, shape in TAILS.items():
        for approximation in ("erf", "tanh"):
            yield samples.bias_gelu(*shape, dtype, bias=False, residual=False, approximation=approximation)


def programs(target: Target) -> Iterator[tuple[pygraph, str | None]]:
    """Every program that the tests ask for."""
    for options in OPTIONS:
        for dtype in DTYPES:
            for shape in SHAPES:
                yield samples.bias_gelu(*shape, dtype, **options), ENGINE
    for approximation in ("erf", "tanh"):
        for dtype in DTYPES:
            for shape in SETTING_SHAPES:
                graph = samples.bias_gelu(*shape, dtype, approximation=approximation)
                for name in (None, *setting_names(graph, target)):
                    yield graph, name
    for _, graph in samples.samples():
        yield graph, None
    for graph in tail_graphs():
        yield graph, ENGINE
    yield samples.bias_gelu(*WIDE), ENGINE
