"""The token-by-token engine of Gated DeltaNet, for decoding. Its kernel is in `_gdn_recurrent_cutile`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cudnn_jax.engines import cutile
from cudnn_jax.engines.base import Artifact, BaseEngine, PlanConfig
from cudnn_jax.engines.capabilities import Capabilities
from cudnn_jax.engines.cutile import Array
from cudnn_jax.engines.linear_attention.facts import LinearFacts
from cudnn_jax.engines.program import Argument, ProgramBuilder
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, Tensor, data_type, pygraph

_SERVED = Capabilities(
    platforms=frozenset({"cuda"}),
    sm_lo=80,
    sm_hi=129,
    dtypes=frozenset({data_type.FLOAT, data_type.HALF, data_type.BFLOAT16}),
)
_MOST_KEYS = 256
_MOST_BLOCKS = 65535
"""Of a grid's second and third axis."""
_OPERANDS = ("q", "k", "v", "g", "beta", "a_log", "dt_bias", "cu_seqlens", "state_indices", "initial_state")
_SETTINGS = ((4096, 6), (2048, 8))
"""(numbers of a state that a block holds, blocks of a multiprocessor), the faster first."""


class CutileGdnRecurrent(BaseEngine):
    """One kernel that reads each state, runs it through its sequence's tokens and writes it; it keeps no chunk."""

    name = "cutile_gdn_recurrent"
    kind = "cutile"

    def configs(self, graph: pygraph, facts: LinearFacts, target: Target) -> Sequence[tuple[tuple[str, int], ...]]:
        for reason in _declines(facts, target):
            raise GraphNotSupportedError(f"{self.name}: {reason}")
        cutile.gpu_code(target)
        cutile.available()
        return settings(facts)

    def build_plan(self, graph: pygraph, facts: Any, config: PlanConfig, target: Target) -> Artifact:
        cutile.available()
        from cudnn_jax.engines.linear_attention import _gdn_recurrent_cutile as kernels

        builder = ProgramBuilder(graph, target)
        rows, occupancy = (dict(config.knobs)[name] for name in ("rows", "occupancy"))
        width = _power_of_two(facts.key_dim)
        tensors = {name: graph.inputs[at] for name, at in facts.ports.items()}
        tensors |= {name: graph.outputs[at] for name, at in facts.results.items()}
        if facts.overwrite:  # one buffer
            del tensors["initial_state"]
        arrays = [tensors.get(name) for name in (*_OPERANDS, "final_state", "O")]
        parameters = [Array(each.data_type, each.dim) if each else False for each in arrays]
        constants = [
            facts.sequences,
            rows,
            width,
            *(facts.heads // heads for heads in (facts.heads_q, facts.heads_k, facts.heads_v)),
            facts.scale,
            facts.pool,
            "initial_state" in facts.ports,
            "final_state" in facts.results,
            facts.overwrite,
            facts.use_qk_l2norm,
            facts.use_beta_sigmoid,
            facts.allow_neg_eigval,
            facts.safe_gate,
            "a_log" in facts.ports,
            "dt_bias" in facts.ports,
            facts.gate_domain == "linear",
            bool(facts.value_dim % rows or facts.key_dim != width),
        ]
        image = cutile.compile_kernel(kernels.gdn_recurrent, [*parameters, *constants], target, occupancy=occupancy)
        grid = (-(-facts.value_dim // rows), facts.heads, facts.sequences + 1)
        builder.cubin(image, grid, [argument for each in arrays if each for argument in _args(builder, each)])
        return builder.build()


def settings(facts: LinearFacts) -> list[tuple[tuple[str, int], ...]]:
    """`rows` of V that a block holds, and the blocks that a multiprocessor runs at a time, `occupancy`."""
    return [(("rows", _rows(facts, held)), ("occupancy", blocks)) for held, blocks in _SETTINGS]


def _args(builder: ProgramBuilder, tensor: Tensor) -> list[Argument]:
    return Array(tensor.data_type, tensor.dim).args(builder.operand(tensor))


def _declines(facts: LinearFacts, target: Target) -> Iterator[str]:
    """Why the engine does not serve: field, value, limit."""
    if reason := _SERVED.place(target):
        yield reason
    if facts.direction != "fwd":
        yield f"direction {facts.direction}, serves fwd"
    if facts.unexplained:
        yield f"graph has {', '.join(facts.unexplained)}, serves the operation alone"
    if facts.scattered:
        yield f"memory of {', '.join(facts.scattered)} is not row-major, serves row-major"
    if reason := _SERVED.element_type(facts.dtype):
        yield f"q {reason}"
    if "O" not in facts.results:
        yield "O is not an output, serves graphs that give it"
    if "state_checkpoints" in facts.results:
        yield f"checkpoint_every_n_tokens {facts.checkpoint_every}, serves 0"
    if facts.key_dim > _MOST_KEYS:
        yield f"K {facts.key_dim}, serves at most {_MOST_KEYS}"
    if not facts.total:
        yield "tokens 0, serves at least 1"
    for name, count in (("heads", facts.heads), ("sequences", facts.sequences + 1)):
        if count > _MOST_BLOCKS:
            yield f"{name} {count}, serves at most {_MOST_BLOCKS}"


def _rows(facts: LinearFacts, held: int) -> int:
    """Rows of V of a block."""
    return min(held // _power_of_two(facts.key_dim), _power_of_two(facts.value_dim))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
