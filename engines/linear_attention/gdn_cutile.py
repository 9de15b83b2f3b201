"""The cuTile engine of Gated DeltaNet. Its programs are in `gdn_forward_cutile` and `gdn_backward_cutile`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from cudnn_jax.engines import cutile
from cudnn_jax.engines.base import Artifact, BaseEngine, PlanConfig
from cudnn_jax.engines.capabilities import Capabilities
from cudnn_jax.engines.linear_attention import gdn_backward_cutile, gdn_forward_cutile
from cudnn_jax.engines.linear_attention.facts import LinearFacts
from cudnn_jax.engines.linear_attention.gdn_launch import C, Knobs
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, data_type, pygraph

_OUTPUTS = {"fwd": ("O",), "bwd": ()}
"""What a graph of a direction must give."""
_MOST_DIM = 256
_DIVISOR = 16
_MOST_FIRST, _MOST_BLOCKS = 2**31 - 1, 65535
"""Of a grid's first axis, and of its second and third."""


class CutileGdn(BaseEngine):
    """Chunks of 64 tokens: a kernel for what is local to each, and one that carries the state along each sequence."""

    name = "cutile_gdn"
    kind = "cutile"
    served = Capabilities(
        platforms=frozenset({"cuda"}),
        sm_lo=80,
        sm_hi=129,
        dtypes=frozenset({data_type.HALF, data_type.BFLOAT16}),
    )
    programs: ClassVar[dict[str, Any]] = {"fwd": gdn_forward_cutile, "bwd": gdn_backward_cutile}
    """Direction -> what makes its settings and its steps."""

    def configs(self, graph: pygraph, facts: LinearFacts, target: Target) -> Sequence[Knobs]:
        for reason in self._declines(facts, target):
            raise GraphNotSupportedError(reason)
        cutile.gpu_code(target)
        cutile.available()
        settings: list[Knobs] = self.programs[facts.direction].settings(facts, target)
        return settings

    def build_plan(self, graph: pygraph, facts: Any, config: PlanConfig, target: Target) -> Artifact:
        cutile.available()
        builder = ProgramBuilder(graph, target)
        self.programs[facts.direction].add_steps(builder, graph, facts, config.knobs, target)
        return builder.build()

    def _declines(self, facts: LinearFacts, target: Target) -> Iterator[str]:
        """Why the engine does not serve: field, value, limit."""
        if reason := self.served.place(target):
            yield reason
        if facts.unexplained:
            yield f"graph has {', '.join(facts.unexplained)}, serves the operation alone"
        if reason := self.served.element_type(facts.dtype):
            yield f"q {reason}"
        if facts.scattered:
            yield f"memory of {', '.join(facts.scattered)} is not row-major"
        for name in _OUTPUTS[facts.direction]:
            if name not in facts.results:
                yield f"{name} is not an output, serves graphs that give it"
        for name, dim in (("key_dim", facts.key_dim), ("value_dim", facts.value_dim)):
            if dim % _DIVISOR or dim > _MOST_DIM:
                yield f"{name} {dim}, serves multiples of {_DIVISOR} to {_MOST_DIM}"
        if facts.direction == "fwd" and facts.checkpoint_every % C:
            yield f"checkpoint_every_n_tokens {facts.checkpoint_every}, serves multiples of {C}"
        if facts.total < 1 or facts.sequences < 1:
            yield f"{facts.total} tokens of {facts.sequences} sequences, serves at least one of each"
        blocks = {
            "chunks": (facts.total // C + facts.sequences, self._most_chunks(facts)),
            "heads": (facts.heads, _MOST_BLOCKS),
            "sequences": (facts.sequences, _MOST_BLOCKS),
        }
        for name, (number, most) in blocks.items():
            if number > most:
                yield f"{name} {number}, serves at most {most}"

    def _most_chunks(self, facts: LinearFacts) -> int:
        """Chunks and heads share the first axis of a grid."""
        return _MOST_FIRST // max(facts.heads, 1)
