"""The token-by-token engines of gated delta rules, for decoding. Their kernel is in `_gdn_recurrent_cutile`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cudnn_jax.engines import cutile
from cudnn_jax.engines.base import Artifact, BaseEngine, PlanConfig
from cudnn_jax.engines.capabilities import Capabilities
from cudnn_jax.engines.linear_attention.facts import LinearFacts
from cudnn_jax.engines.linear_attention.gdn_launch import Knobs, Launch, power
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, data_type, pygraph

_SERVED = Capabilities(
    platforms=frozenset({"cuda"}),
    sm_lo=80,
    sm_hi=129,
    dtypes=frozenset({data_type.FLOAT, data_type.HALF, data_type.BFLOAT16}),
)
_MOST_KEYS = 256
_MOST_BLOCKS = 65535
"""Of a grid's second and third axis."""
_ARRAYS = (
    *("q", "k", "v", "g", "beta", "w", "a_log", "dt_bias"),
    *("cu_seqlens", "state_indices", "initial_state", "final_state", "O"),
)
_SETTINGS = ((4096, 6), (2048, 8))
"""(numbers of a state that a block holds, blocks of a multiprocessor), the faster on an H200 first, which keeps some in
local memory."""


class CutileGdnRecurrent(BaseEngine):
    """One kernel that reads each state, runs it through its sequence's tokens and writes it; it keeps no chunk."""

    name = "cutile_gdn_recurrent"
    kind = "cutile"

    def configs(self, graph: pygraph, facts: LinearFacts, target: Target) -> Sequence[Knobs]:
        for reason in _declines(facts, target):
            raise GraphNotSupportedError(reason)
        cutile.gpu_code(target)
        cutile.available()
        return settings(facts, target)

    def build_plan(self, graph: pygraph, facts: Any, config: PlanConfig, target: Target) -> Artifact:
        cutile.available()
        from cudnn_jax.engines.linear_attention import _gdn_recurrent_cutile as kernels

        builder = ProgramBuilder(graph, target)
        launch = Launch(builder, graph, facts, config.knobs, target)
        rows, width = launch.knobs["rows"], power(facts.key_dim)
        launch.run(
            kernels.gdn_recurrent,
            [launch.taken.get(name) for name in _ARRAYS],
            [
                *(facts.sequences, rows, width, *launch.ratios, facts.scale),
                *(facts.operation != "gdn", facts.operation == "gdn2"),
                *(facts.pool, "initial_state" in facts.ports, "final_state" in facts.results, facts.overwrite),
                *(facts.use_qk_l2norm, *launch.gate_options(), facts.gate_lower_bound or 0.0),
                bool(facts.value_dim % rows or facts.key_dim != width),
            ],
            (-(-facts.value_dim // rows), facts.heads, facts.sequences + 1),
            occupancy=launch.knobs["occupancy"],
        )
        return builder.build()


class CutileKdaRecurrent(CutileGdnRecurrent):
    """The same with a gate for each key channel."""

    name = "cutile_kda_recurrent"


class CutileGdn2Recurrent(CutileGdnRecurrent):
    """The same, and beta for each key channel."""

    name = "cutile_gdn2_recurrent"


def settings(facts: LinearFacts, target: Target) -> list[Knobs]:
    """`rows` of V that a block holds, and the blocks that a multiprocessor runs at a time, `occupancy`."""
    ranked = _SETTINGS if target.sm == 90 else _SETTINGS[::-1]
    offered = ranked[:1] if facts.batch_invariant else ranked
    return [(("rows", _rows(facts, held)), ("occupancy", blocks)) for held, blocks in offered]


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
    if facts.batch_invariant and facts.dtype is not data_type.FLOAT:
        yield f"batch_invariant of {facts.dtype.value}, for which there is one engine, cutile_{facts.operation}"
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
    return min(held // power(facts.key_dim), power(facts.value_dim))
