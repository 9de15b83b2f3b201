"""What the cuTile programs of backwards share: gradients of heads that are shared, and of a gate's parameters."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_jax.engines.cutile import Array
from cudnn_jax.engines.linear_attention.gdn_launch import C, Given, Launch, power
from cudnn_jax.graph.linear_attention import GRADIENTS

_SHARED = ("q", "k", "v")
"""What several heads may share, in the order of `ratios`."""
_SUM_ROWS, _SUM_COLS = 128, 16
"""The tile in which the chunks' parts of a gate's parameters are added."""


class BackwardLaunch(Launch):
    """Adds launches to a program that gives gradients."""

    def gradient(self, port: str) -> Given | None:
        """A port's gradient: an output, or room for one that nobody asks for. None where there is no such input."""
        if port not in self.given:
            return None
        if GRADIENTS[port] in self.given:
            return self.given[GRADIENTS[port]]
        array, _ = self.given[port]
        return self.scratch(array.dtype, *array.shape)

    def of_each_head(self) -> list[Given]:
        """Room for gradients of q, k and v by each head of HO: the gradients themselves where no head is shared."""
        return [self._room(port, ratio) for port, ratio in zip(_SHARED, self.ratios, strict=True)]

    def _room(self, port: str, ratio: int) -> Given:
        made = self.gradient(port)
        assert made is not None
        if ratio == 1:
            return made
        dim = made[0].shape[2]
        return self.scratch(self.facts.dtype, self.facts.total, self.facts.heads, dim)

    def add_heads(self, made: Sequence[Given]) -> None:
        """Adds up the parts that `of_each_head` had made."""
        from cudnn_jax.engines.linear_attention import _gdn_backward_cutile as kernels

        for port, ratio, parts in zip(_SHARED, self.ratios, made, strict=True):
            name = GRADIENTS[port]
            if ratio > 1 and name in self.given:
                array, _ = self.given[name]
                grid = (-(-self.facts.total // C), array.shape[1], 1)
                self.run(kernels.gdn_backward_shared, [parts, self.given[name]], [ratio, power(array.shape[2])], grid)

    def add_parameter(self, parts: Given, which: int, port: str) -> None:
        """Adds up parts (kinds, slots, columns) of the gradient of a gate's parameter, those of kind `which`."""
        from cudnn_jax.engines.linear_attention import _gdn_backward_cutile as kernels

        columns = parts[0].shape[2]
        gradient = self.gradient(port)
        assert gradient is not None
        flat = Array(gradient[0].dtype, (columns,)), gradient[1]
        self.run(
            kernels.gdn_backward_parameter,
            [parts, flat],
            [which, _SUM_ROWS, _SUM_COLS],
            (-(-columns // _SUM_COLS), 1, 1),
        )


def by_place(given: Given | None) -> Given | None:
    """An array (n, heads, ...) as one of (n * heads, ...): a step takes at most 192 numbers and addresses."""
    if given is None:
        return None
    array, argument = given
    rows, heads, *rest = array.shape
    return Array(array.dtype, (rows * heads, *rest)), argument
