"""Small CuTe-DSL objects to look at: the bias-GELU kernel over a matrix of any size."""

from __future__ import annotations

import dataclasses

from cudnn_jax.engines import cutedsl
from cudnn_jax.engines.kernels import CuteObject
from cudnn_jax.engines.pointwise import samples
from cudnn_jax.engines.pointwise.bias_gelu_cutedsl import OPERANDS
from cudnn_jax.engines.pointwise.facts import analyze
from cudnn_jax.engines.target import named


def compiled(sm: int = 90, rows: int = 64, cols: int = 48) -> CuteObject:
    graph = samples.bias_gelu(rows, cols)
    graph.freeze()
    problem = analyze(graph).bias_gelu
    assert problem is not None
    kernels = cutedsl.kernels("cudnn_jax.engines.pointwise._bias_gelu_cutedsl")
    pointers = [cutedsl.pointer(problem.dtypes[name]) for name in OPERANDS if name in problem.dtypes]
    target = dataclasses.replace(named("h200"), sm=sm)
    return cutedsl.compile_function(kernels.function(problem, 128, 2, 1), pointers, target, "bias_gelu")
