"""How the bias-GELU kernel cuts a matrix: plain numbers, without a DSL."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cudnn_jax.engines.pointwise.bias_gelu import BiasGelu

VECTOR_BYTES = 16


@dataclass(frozen=True)
class Slabs:
    """A matrix of `rows` x `cols` as one line of elements, cut into vectors, and these into slabs of whole rows.

    The thread that begins at vector t of the first slab works at vector t + k * length of each slab k, all of which
    hold the same columns.

    Attributes:
      width: elements of a vector, 16 bytes of them.
      count: slabs.
      length: vectors of a slab; the last slab may reach beyond the matrix.
      whole: vectors of the matrix, the elements behind the last one left aside.
      rest: these elements.
      threads: how many begin inside both the first slab and the matrix.
      period: vectors after which the columns of a vector repeat.
      wide: whether indices need 64 bits.
    """

    width: int
    count: int
    length: int
    whole: int
    rest: int
    threads: int
    period: int
    wide: bool

    @classmethod
    def of(cls, problem: BiasGelu, most: int) -> Slabs:
        """At most `most` slabs."""
        width = VECTOR_BYTES * 8 // problem.dtype.itemsize_bits
        common = math.gcd(width, problem.cols)
        whole, rest = divmod(problem.rows * problem.cols, width)
        # A slab begins with a row and with a vector.
        group = width // common
        rows = -(-problem.rows // (most * group)) * group
        length = rows * problem.cols // width
        count = max(1, -(-whole // length))
        return cls(
            width=width,
            count=count,
            length=length,
            whole=whole,
            rest=rest,
            threads=min(length, whole),
            period=problem.cols // common,
            wide=count * length * width >= 2**31,
        )

    def blocks(self, threads: int) -> int:
        """Blocks of `threads` that the matrix takes, at least one, which sees to `rest`."""
        return max(1, -(-self.threads // threads))
