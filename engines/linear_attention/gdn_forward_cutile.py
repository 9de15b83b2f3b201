"""The cuTile program of Gated DeltaNet's forward. Its kernels are in `_gdn_chunks_cutile` and `_gdn_forward_cutile`."""

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
_Given = tuple[Array, Argument]
"""An array and its memory."""

C = 64
"""Tokens of a chunk."""
_HEADS = 16
"""Heads whose gates a block sums up."""
_COPIED_ROWS = 64


def settings(facts: LinearFacts, sm_count: int) -> list[Knobs]:
    """`values`, the columns of a state that a block of the scan keeps; `blocks` of it on a multiprocessor at a time; and
    whether the vectors of a chunk come by `tma`.

    Narrow parts are more blocks, wide ones read q and k less often.
    """
    narrow, wide = min(32, _power(facts.value_dim)), min(64, _power(facts.value_dim))
    few = facts.sequences * facts.heads * -(-facts.value_dim // narrow) <= sm_count
    made = [(narrow, 1), (wide, 2)] if few else [(wide, 2), (narrow, 1)]
    pairs = list(dict.fromkeys((values, blocks) for values, blocks in made))
    return [(("values", v), ("blocks", b), ("tma", tma)) for tma in (1, 0) for v, b in pairs]


def add_steps(builder: ProgramBuilder, graph: pygraph, facts: LinearFacts, knobs: Knobs, target: Target) -> None:
    """Appends all that gives the graph's outputs to a program."""
    _Launch(builder, graph, facts, dict(knobs), target).run()


class _Launch:
    """Adds the launches of one graph to a program."""

    def __init__(
        self, builder: ProgramBuilder, graph: pygraph, facts: LinearFacts, knobs: dict[str, int], target: Target
    ) -> None:
        self.builder = builder
        self.facts = facts
        self.knobs = knobs
        self.target = target
        tensors = {name: graph.inputs[at] for name, at in facts.ports.items()}
        tensors |= {name: graph.outputs[at] for name, at in facts.results.items()}
        self.given = {
            name: (Array(tensor.data_type, tensor.dim), builder.operand(tensor)) for name, tensor in tensors.items()
        }
        self.slots = facts.total // C + facts.sequences

    def run(self) -> None:
        chunks, first_slot = self._table()
        gates, rates = self._gates(chunks)
        prepared = self._prepare(chunks, gates, rates)
        self._scan(first_slot, [gates, rates, *prepared])

    def _table(self) -> tuple[_Given, _Given]:
        from cudnn_jax.engines.linear_attention import _gdn_chunks_cutile as kernels

        facts = self.facts
        chunks = self._scratch(data_type.INT32, self.slots, 4)
        first_slot = self._scratch(data_type.INT32, facts.sequences + 1)
        columns = facts.heads * facts.value_dim
        output = (Array(facts.dtype, (facts.total, columns)), self.given["O"][1])
        blocks = max(facts.sequences + 1, -(-facts.total // C))
        self._run(
            kernels.gdn_chunk_table,
            [self.given["cu_seqlens"], chunks, first_slot, output],
            [facts.sequences, self.slots, min(256, _power(columns))],
            (blocks, 1, 1),
        )
        return chunks, first_slot

    def _gates(self, chunks: _Given) -> tuple[_Given, _Given]:
        from cudnn_jax.engines.linear_attention import _gdn_chunks_cutile as kernels

        facts = self.facts
        heads = min(_HEADS, _power(facts.heads))
        gates, rates = (self._scratch(data_type.FLOAT, self.slots, facts.heads, C) for _ in range(2))
        self._run(
            kernels.gdn_gates,
            [*map(self.given.get, ("g", "beta", "a_log", "dt_bias")), chunks, gates, rates],
            [
                *(heads, facts.use_beta_sigmoid, facts.allow_neg_eigval, facts.safe_gate),
                *(name in self.given for name in ("a_log", "dt_bias")),
                facts.gate_domain == "linear",
            ],
            (-(-facts.heads // heads), self.slots, 1),
        )
        return gates, rates

    def _prepare(self, chunks: _Given, gates: _Given, rates: _Given) -> list[_Given | None]:
        """The arrays of chunks that the scan reads: inverse, attention, and norms of q and k."""
        from cudnn_jax.engines.linear_attention import _gdn_chunks_cutile as kernels

        facts = self.facts
        inverse, attention = (self._scratch(facts.dtype, self.slots, facts.heads, C, C) for _ in range(2))
        norms = [
            self._scratch(data_type.FLOAT, self.slots, facts.heads, C) if facts.use_qk_l2norm else None
            for _ in range(2)
        ]
        self._run(
            kernels.gdn_prepare,
            [self.given["q"], self.given["k"], chunks, gates, rates, inverse, attention, *norms],
            [_power(facts.key_dim), *self._ratios()[:2], facts.scale, facts.use_qk_l2norm],
            (facts.heads, self.slots, 1),
            occupancy=3,
        )
        return [inverse, attention, *norms]

    def _scan(self, first_slot: _Given, prepared: Sequence[_Given | None]) -> None:
        from cudnn_jax.engines.linear_attention import _gdn_forward_cutile as kernels

        facts, given = self.facts, self.given
        in_pool = facts.pool and facts.overwrite
        if in_pool and "final_state" in given:
            self._copy("initial_state", "final_state")
        first_checkpoint = self._checkpoint_rows()
        self._run(
            kernels.gdn_scan,
            [
                *map(given.get, ("q", "k", "v", "cu_seqlens")),
                first_slot,
                *prepared,
                *map(given.get, ("initial_state", "state_indices", "O", "final_state", "state_checkpoints")),
                first_checkpoint,
            ],
            [
                *(_power(facts.key_dim), self.knobs["values"], *self._ratios(), facts.scale, facts.use_qk_l2norm),
                *(name in given for name in ("initial_state", "state_indices", "final_state")),
                *(in_pool, facts.checkpoint_every // C if first_checkpoint else 0, bool(self.knobs["tma"])),
            ],
            (-(-facts.value_dim // self.knobs["values"]), facts.heads, facts.sequences),
            occupancy=self.knobs["blocks"],
        )

    def _copy(self, source: str, target: str) -> None:
        from cudnn_jax.engines.linear_attention import _gdn_forward_cutile as kernels

        array, _ = self.given[source]
        rows, cols = prod(array.shape[:-1]), array.shape[-1]
        matrices = [(Array(array.dtype, (rows, cols)), self.given[name][1]) for name in (source, target)]
        grid = (-(-rows // _COPIED_ROWS), 1, 1)
        self._run(kernels.gdn_copy_states, matrices, [_COPIED_ROWS, _power(cols)], grid)

    def _checkpoint_rows(self) -> _Given | None:
        """Each sequence's first row of the checkpoints, which are cleared; None where they are not asked for."""
        from cudnn_jax.engines.linear_attention import _gdn_forward_cutile as kernels

        if "state_checkpoints" not in self.given:
            return None
        array, operand = self.given["state_checkpoints"]
        nbytes = prod(array.shape) * array.dtype.itemsize_bits // 8
        if not nbytes:
            return None
        self.builder.step("fill", dest=operand, value=0, width=1, bytes=nbytes)
        rows = self._scratch(data_type.INT32, self.facts.sequences)
        self._run(
            kernels.gdn_checkpoint_rows,
            [self.given["cu_seqlens"], rows],
            [self.facts.checkpoint_every],
            (self.facts.sequences, 1, 1),
        )
        return rows

    def _ratios(self) -> tuple[int, int, int]:
        """How many heads share a head of q, of k and of v."""
        facts = self.facts
        return facts.heads // facts.heads_q, facts.heads // facts.heads_k, facts.heads // facts.heads_v

    def _scratch(self, dtype: data_type, *shape: int) -> _Given:
        size = prod(shape) * dtype.itemsize_bits // 8
        return Array(dtype, shape), ("workspace", self.builder.workspace(size))

    def _run(
        self,
        kernel: Any,
        arrays: Sequence[_Given | None],
        constants: Sequence[bool | int | float],
        grid: tuple[int, int, int],
        **hints: int,
    ) -> None:
        parameters = [False if given is None else given[0] for given in arrays]
        image = cutile.compile_kernel(kernel, [*parameters, *constants], self.target, **hints)
        args = [argument for given in arrays if given is not None for argument in given[0].args(given[1])]
        self.builder.cubin(image, grid, args)


def _power(size: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (size - 1).bit_length()
