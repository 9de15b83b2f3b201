"""The engine of residual + gelu(x + bias): one CuTe-DSL kernel that reads x and residual once and writes out once."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_jax.engines import cutedsl
from cudnn_jax.engines.base import Artifact, BaseEngine, PlanConfig
from cudnn_jax.engines.capabilities import Capabilities
from cudnn_jax.engines.pointwise.bias_gelu import BiasGelu
from cudnn_jax.engines.pointwise.facts import PointwiseFacts
from cudnn_jax.engines.pointwise.slabs import Slabs
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, data_type, pygraph

OPERANDS = ("x", "bias", "residual", "pre", "out")
"""The kernel's arguments in order, those that a graph has."""

_SERVED = Capabilities(
    platforms=frozenset({"cuda"}),
    sm_lo=80,
    sm_hi=121,
    dtypes=frozenset({data_type.FLOAT, data_type.HALF, data_type.BFLOAT16}),
)
_MOST_ELEMENTS = 2**40

_KNOBS = ("threads", "vectors", "tail")
_SETTINGS = {
    "erf, 16 bits": ((256, 2, 1), (256, 4, 1), (128, 1, 1), (256, 2, 0)),
    "erf, 32 bits": ((256, 2, 0), (256, 4, 0), (128, 1, 0), (512, 2, 0)),
    "tanh": ((256, 2, 0), (256, 4, 0), (128, 1, 0), (512, 2, 0)),
}
"""(threads, vectors, tail), the predicted best first; bias_gelu_cutedsl.md has the reasons.

`tail` 1 takes GELU from a polynomial for the tail of the normal distribution, good enough for 16-bit results alone.
"""


class CutedslBiasGelu(BaseEngine):
    """Fused bias, GELU and residual over row-major matrices, in float32 inside."""

    name = "cutedsl_bias_gelu"
    kind = "cutedsl"

    def configs(self, graph: pygraph, facts: PointwiseFacts, target: Target) -> Sequence[tuple[tuple[str, int], ...]]:
        reason = _SERVED.place(target) or _mismatch(facts)
        if reason:
            raise GraphNotSupportedError(reason)
        cutedsl.available()
        assert facts.bias_gelu is not None
        return [tuple(zip(_KNOBS, values, strict=True)) for values in _settings(facts.bias_gelu, target.sm_count or 1)]

    def build_plan(self, graph: pygraph, facts: PointwiseFacts, config: PlanConfig, target: Target) -> Artifact:
        problem = facts.bias_gelu
        assert problem is not None
        kernels = cutedsl.kernels("cudnn_jax.engines.pointwise._bias_gelu_cutedsl")
        names = [name for name in OPERANDS if name in problem.dtypes]
        pointers = [cutedsl.pointer(problem.dtypes[name]) for name in names]
        function = kernels.function(problem, **dict(config.knobs))
        compiled = cutedsl.compile_function(function, pointers, target, "bias_gelu")
        inputs, outputs = graph.inputs, graph.outputs
        tensors = {name: inputs[at] for name, at in problem.ports.items()}
        tensors |= {name: outputs[at] for name, at in problem.results.items()}
        builder = ProgramBuilder(graph, target)
        builder.cute(compiled, [builder.operand(tensors[name]) for name in names])
        return builder.build()


def _settings(problem: BiasGelu, multiprocessors: int) -> list[tuple[int, int, int]]:
    """Those of the table that fit the matrix: in its order, and before them the finer ones that fill the device."""
    row = "tanh" if problem.approximation == "tanh" else f"erf, {problem.dtype.itemsize_bits} bits"
    blocks = {}
    for threads, most, tail in _SETTINGS[row]:
        slabs = Slabs.of(problem, most)
        blocks[threads, slabs.count, tail] = slabs.blocks(threads)
    enough = 2 * multiprocessors
    return sorted(blocks, key=lambda setting: -min(blocks[setting], enough))


def _mismatch(facts: PointwiseFacts) -> str | None:
    """Why the kernel does not compute the graph, or None."""
    problem = facts.bias_gelu
    if problem is None:
        return f"graph {facts.not_bias_gelu}, serves residual + gelu(x + bias)"
    odd = [kind for kind in problem.inner_types if kind is not data_type.FLOAT]
    if odd:
        return f"compute and intermediate types {odd[0].value}, serves float32"
    if problem.scattered:
        return f"layout of {', '.join(problem.scattered)}, serves row-major matrices"
    mixed = {kind.value for kind in problem.dtypes.values()}
    if len(mixed) > 1:
        return f"dtypes {' and '.join(sorted(mixed))}, serves one for all operands"
    return _SERVED.element_type(problem.dtype) or _size(problem)


def _size(problem: BiasGelu) -> str | None:
    elements = problem.rows * problem.cols
    if not 1 <= elements <= _MOST_ELEMENTS:
        return f"{elements} elements, serves 1 to {_MOST_ELEMENTS}"
    return None
