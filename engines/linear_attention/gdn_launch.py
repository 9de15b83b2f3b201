"""What the cuTile programs of Gated DeltaNet share: launches, and chunks of 64 tokens with what prepares each one."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from cudnn_jax.engines import cutile
from cudnn_jax.engines.cutile import Array
from cudnn_jax.engines.linear_attention.facts import LinearFacts
from cudnn_jax.engines.program import Argument, ProgramBuilder
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import data_type, pygraph

Knobs = tuple[tuple[str, int], ...]
Given = tuple[Array, Argument]
"""An array and its memory."""

C = 64
"""Tokens of a chunk."""
_KEYS_IN_REGISTERS = 64
"""Columns of q and k that `gdn_prepare` loads at a time where registers hold the operands of products."""


class Launch:
    """Adds the launches of one graph to a program. Arrays that are absent are None."""

    def __init__(
        self, builder: ProgramBuilder, graph: pygraph, facts: LinearFacts, knobs: Knobs, target: Target
    ) -> None:
        self.builder = builder
        self.facts = facts
        self.knobs = dict(knobs)
        self.target = target
        tensors = {name: graph.inputs[at] for name, at in facts.ports.items()}
        tensors |= {name: graph.outputs[at] for name, at in facts.results.items()}
        self.given = {
            name: (Array(tensor.data_type, tensor.dim), builder.operand(tensor)) for name, tensor in tensors.items()
        }
        self.ratios = tuple(facts.heads // heads for heads in (facts.heads_q, facts.heads_k, facts.heads_v))
        """How many heads share a head of q, of k and of v."""

    @property
    def taken(self) -> dict[str, Given]:
        """What a forward's kernel takes: a state that is written over is one buffer, final_state, and comes once."""
        dropped = ("initial_state",) if self.facts.overwrite else ()
        return {name: each for name, each in self.given.items() if name not in dropped}

    def gate_options(self) -> tuple[bool, ...]:
        facts = self.facts
        given = (name in self.given for name in ("a_log", "dt_bias"))
        beta = (facts.use_beta_sigmoid, facts.allow_neg_eigval)
        return (*beta, facts.safe_gate, *given, facts.gate_domain == "linear")

    def scratch(self, dtype: data_type, *shape: int) -> Given:
        """Memory of the workspace."""
        size = prod(shape) * dtype.itemsize_bits // 8
        return Array(dtype, shape), ("workspace", self.builder.workspace(size))

    def run(
        self,
        kernel: Any,
        arrays: Sequence[Given | None],
        constants: Sequence[bool | int | float],
        grid: tuple[int, int, int],
        **hints: int,
    ) -> None:
        """Appends a launch; an array that is absent is the constant False."""
        parameters = [False if given is None else given[0] for given in arrays]
        image = cutile.compile_kernel(kernel, [*parameters, *constants], self.target, **hints)
        args = [argument for given in arrays if given is not None for argument in given[0].args(given[1])]
        self.builder.cubin(image, grid, args)


class ChunkedLaunch(Launch):
    """What the chunked programs begin with: which tokens each chunk is, its gates, its inverse and its attention."""

    def __init__(
        self, builder: ProgramBuilder, graph: pygraph, facts: LinearFacts, knobs: Knobs, target: Target
    ) -> None:
        super().__init__(builder, graph, facts, knobs, target)
        self.slots = facts.total // C + facts.sequences
        self.gate_heads = min(16, power(facts.heads))
        """Heads whose gates a block works on."""

    @property
    def parts(self) -> int:
        """Of the value columns, each of which a block of the scan keeps a state of."""
        return -(-self.facts.value_dim // self.knobs["values"])

    def order(self, blocks: int, at_once: int) -> Given | None:
        """Room for the sequences, the longest first, for a scan of so many blocks a sequence, of which a multiprocessor
        has some at once. None where no block waits for another; where some do, a long one may not end alone."""
        assert self.target.sm_count is not None
        waiting = blocks * self.facts.sequences > at_once * self.target.sm_count
        return self.scratch(data_type.INT32, self.facts.sequences) if waiting and self.facts.sequences > 1 else None

    def table(self, cleared: Given | None = None, order: Given | None = None) -> tuple[Given, Given]:
        """chunks and first_slot; rows of `cleared` (total, columns) that belong to no sequence become 0.

        `order` (sequences) gets the sequences, those with the most chunks first.
        """
        from cudnn_jax.engines.linear_attention import _gdn_chunks_cutile as kernels

        facts = self.facts
        chunks = self.scratch(data_type.INT32, self.slots, 4)
        first_slot = self.scratch(data_type.INT32, facts.sequences + 1)
        blocks = facts.sequences + 1
        if cleared is not None:
            blocks = max(blocks, -(-facts.total // C))
        self.run(
            kernels.gdn_chunk_table,
            [self.given["cu_seqlens"], chunks, first_slot, order, cleared],
            [
                *(facts.sequences, self.slots, 0 if cleared is None else min(256, power(cleared[0].shape[1]))),
                order is not None,
            ],
            (blocks, 1, 1),
        )
        return chunks, first_slot

    def gates(self, chunks: Given) -> tuple[Given, Given]:
        """The cumulated log gates and beta, (slots, HO, C) float32 each."""
        from cudnn_jax.engines.linear_attention import _gdn_chunks_cutile as kernels

        gates, rates = (self.scratch(data_type.FLOAT, self.slots, self.facts.heads, C) for _ in range(2))
        self.run(
            kernels.gdn_gates,
            [*map(self.given.get, ("g", "beta", "a_log", "dt_bias")), chunks, gates, rates],
            [self.gate_heads, *self.gate_options()],
            (self.slots, -(-self.facts.heads // self.gate_heads), 1),
        )
        return gates, rates

    @property
    def refined(self) -> bool:
        """Whether the inverse is worth more products: float16 has the digits, and sm_80 not the registers."""
        assert self.target.sm is not None
        return self.facts.dtype is data_type.HALF and self.target.sm >= 90

    def _prepare_hints(self) -> dict[str, int]:
        """The blocks of `gdn_prepare` on a multiprocessor, as many as no image spills registers for, and its warps."""
        facts, sm = self.facts, self.target.sm
        assert sm is not None
        if sm == 90:
            three = (64 if facts.use_qk_l2norm else 0) < facts.key_dim <= 128 and not self.refined
            return {"occupancy": 3 if three else 2}
        return {"occupancy": 1, **({"num_worker_warps": 8} if sm >= 120 else {})}

    def prepare(self, chunks: Given, gates: Given, rates: Given) -> list[Given | None]:
        """inverse, attention, q_norms and k_norms of `gdn_prepare`; the norms are None without use_qk_l2norm."""
        from cudnn_jax.engines.linear_attention import _gdn_chunks_cutile as kernels

        facts = self.facts
        squares = [self.scratch(facts.dtype, self.slots, facts.heads, C, C) for _ in range(2)]
        norms = [
            self.scratch(data_type.FLOAT, self.slots, facts.heads, C) if facts.use_qk_l2norm else None for _ in range(2)
        ]
        made = [*squares, *norms]
        width = power(facts.key_dim)
        if not products_of_shared_memory(self.target):
            width = min(_KEYS_IN_REGISTERS, width)
        self.run(
            kernels.gdn_prepare,
            [self.given["q"], self.given["k"], chunks, gates, rates, *made],
            [
                *(width, -(-facts.key_dim // width), facts.heads, *self.ratios[:2]),
                *(facts.scale, facts.use_qk_l2norm, self.refined),
            ],
            (self.slots * facts.heads, 1, 1),
            **self._prepare_hints(),
        )
        return made

    def checkpoint_rows(self) -> Given | None:
        """Each sequence's first row of the checkpoints, which are cleared; None where they are not asked for."""
        from cudnn_jax.engines.linear_attention import _gdn_forward_cutile as kernels

        if "state_checkpoints" not in self.given:
            return None
        array, operand = self.given["state_checkpoints"]
        nbytes = prod(array.shape) * array.dtype.itemsize_bits // 8
        if not nbytes:
            return None
        self.builder.step("fill", dest=operand, value=0, width=1, bytes=nbytes)
        rows = self.scratch(data_type.INT32, self.facts.sequences)
        self.run(
            kernels.gdn_checkpoint_rows,
            [self.given["cu_seqlens"], rows],
            [self.facts.checkpoint_every],
            (self.facts.sequences, 1, 1),
        )
        return rows


def products_of_shared_memory(target: Target) -> bool:
    """Whether products read operands out of shared memory. Elsewhere registers hold them, and it takes more warps."""
    return target.sm is not None and 90 <= target.sm < 120


def power(size: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (size - 1).bit_length()
