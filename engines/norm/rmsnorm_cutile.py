"""The cuTile RMS norm engine, forward and backward, over a row-major matrix. Its kernels are in `_rmsnorm_cutile`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cudnn_jax.engines import cutile
from cudnn_jax.engines.base import Artifact, BaseEngine, PlanConfig
from cudnn_jax.engines.capabilities import Capabilities
from cudnn_jax.engines.cutile import Array
from cudnn_jax.engines.norm.facts import NormFacts
from cudnn_jax.engines.norm.rmsnorm_tiles import Knobs, Tiling, settings
from cudnn_jax.engines.program import Argument, ProgramBuilder
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, data_type, pygraph

_SERVED = Capabilities(
    platforms=frozenset({"cuda"}),
    sm_lo=80,
    sm_hi=129,
    dtypes=frozenset({data_type.FLOAT, data_type.HALF, data_type.BFLOAT16}),
    compute=frozenset({data_type.FLOAT}),
)
_Given = tuple[Array, Argument]
"""An array and its memory."""

_MOST_ROWS = 2**31 - 1
_REDUCE_ROWS, _REDUCE_COLS = 64, 32
"""The tile in which the blocks' sums are added."""


def most_cols(facts: NormFacts) -> int:
    """The longest row whose images need no local memory; the table of images holds each of these."""
    if facts.direction == "fwd":
        return 16384
    one_sum = len({"DScale", "DBias"} & set(facts.results)) < 2
    return 16384 if one_sum and facts.dtype.itemsize_bits == 16 else 12288


class CutileRmsNorm(BaseEngine):
    """One kernel forward; backward a kernel for DX and sums by block, then one that adds these up for each weight."""

    name = "cutile_rmsnorm"
    kind = "cutile"

    def configs(self, graph: pygraph, facts: NormFacts, target: Target) -> Sequence[Knobs]:
        for reason in _declines(facts, target):
            raise GraphNotSupportedError(reason)
        cutile.gpu_code(target)
        cutile.available()
        assert target.sm_count is not None
        return settings(facts, target.sm_count)

    def build_plan(self, graph: pygraph, facts: Any, config: PlanConfig, target: Target) -> Artifact:
        cutile.available()
        builder = ProgramBuilder(graph, target)
        launch = _Launch(builder, graph, facts, Tiling.of(facts, config.knobs), target)
        if facts.direction == "fwd":
            launch.forward()
        else:
            launch.backward()
        return builder.build()


def _declines(facts: NormFacts, target: Target) -> Iterator[str]:
    """Why the engine does not serve: field, value, limit."""
    if reason := _SERVED.place(target):
        yield reason
    if facts.unexplained:
        yield f"graph has {', '.join(facts.unexplained)}, serves the norm alone"
    for name, dtype in facts.dtypes.items():
        if reason := _SERVED.element_type(dtype):
            yield f"{name} {reason}"
    if reason := _SERVED.compute_type(facts.compute):
        yield reason
    whole = "Y" if facts.direction == "fwd" else "DX"
    if whole not in facts.results:
        yield f"{whole} is not an output, serves graphs that give it"
    if facts.scattered:
        yield f"memory of {', '.join(facts.scattered)} is not rows of the normalised axes, serves row-major"
    if not 1 <= facts.rows <= _MOST_ROWS:
        yield f"rows {facts.rows}, serves 1 to {_MOST_ROWS}"
    if facts.cols > most_cols(facts):
        yield f"cols {facts.cols}, serves at most {most_cols(facts)}"


class _Launch:
    """Adds the launches of one graph to a program."""

    def __init__(
        self, builder: ProgramBuilder, graph: pygraph, facts: NormFacts, tiling: Tiling, target: Target
    ) -> None:
        assert target.sm_count is not None
        self.builder = builder
        self.facts = facts
        self.tiling = tiling
        self.target = target
        self.blocks = tiling.grid(facts, target.sm_count)
        tensors = {name: graph.inputs[at] for name, at in facts.ports.items()}
        tensors |= {name: graph.outputs[at] for name, at in facts.results.items()}
        self.operands = {name: builder.operand(tensor) for name, tensor in tensors.items()}

    def forward(self) -> None:
        from cudnn_jax.engines.norm import _rmsnorm_cutile as kernels

        facts, tiling = self.facts, self.tiling
        self._run(
            kernels.rms_norm_forward,
            [
                self._matrix("input"),
                self._weight("scale"),
                self._weight("bias"),
                self._matrix("Y"),
                self._statistics("inv_var"),
            ],
            [
                *(tiling.rows, tiling.chunk, tiling.chunks, *tiling.reread(facts), facts.cols, facts.epsilon),
                *(name in self.operands for name in ("scale", "bias", "inv_var")),
                tiling.ragged(facts),
            ],
            self.blocks,
            **tiling.hints,
        )

    def backward(self) -> None:
        from cudnn_jax.engines.norm import _rmsnorm_cutile as kernels

        facts, tiling = self.facts, self.tiling
        sums = {name: self._sums(name) for name in ("DScale", "DBias")}
        self._run(
            kernels.rms_norm_backward,
            [
                self._matrix("grad"),
                self._matrix("input"),
                self._weight("scale"),
                self._statistics("inv_variance"),
                self._matrix("DX"),
                *sums.values(),
            ],
            [
                *(tiling.rows, tiling.chunk, tiling.chunks, facts.cols),
                *(name in self.operands for name in ("scale", "DScale", "DBias")),
                *tiling.room(facts),
                tiling.ragged(facts),
            ],
            self.blocks,
            **tiling.hints,
        )
        for name, made in sums.items():
            if made is not None:
                tiles = -(-self.blocks // _REDUCE_ROWS)
                constants = [_REDUCE_ROWS, _REDUCE_COLS, tiles]
                columns = -(-facts.cols // _REDUCE_COLS)
                self._run(kernels.rms_norm_reduce, [made, self._weight(name)], constants, columns)

    def _run(
        self,
        kernel: Any,
        arrays: Sequence[_Given | None],
        constants: Sequence[bool | int | float],
        blocks: int,
        **hints: int,
    ) -> None:
        parameters = [False if given is None else given[0] for given in arrays]
        image = cutile.compile_kernel(kernel, [*parameters, *constants], self.target, **hints)
        args = [argument for given in arrays if given is not None for argument in given[0].args(given[1])]
        self.builder.cubin(image, (blocks, 1, 1), args)

    def _matrix(self, name: str) -> _Given:
        return self._given(name, (self.facts.rows, self.facts.cols))

    def _weight(self, name: str) -> _Given | None:
        return self._given(name, (self.facts.cols,)) if name in self.operands else None

    def _statistics(self, name: str) -> _Given | None:
        return self._given(name, (self.facts.rows,)) if name in self.operands else None

    def _given(self, name: str, shape: tuple[int, ...]) -> _Given:
        return Array(self.facts.dtypes[name], shape), self.operands[name]

    def _sums(self, name: str) -> _Given | None:
        """Workspace for one float32 row of sums from each block."""
        if name not in self.operands:
            return None
        array = Array(data_type.FLOAT, (self.blocks, self.facts.cols))
        return array, ("workspace", self.builder.workspace(4 * self.blocks * self.facts.cols))
