"""How the cuTile RMS norm cuts a matrix: settings in the order in which they are expected to be fast."""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_jax.engines.norm.facts import NormFacts

Knobs = tuple[tuple[str, int], ...]

_VECTOR_BYTES = 16
_WARP = 32
_FORWARD_ELEMENTS = 32
"""Elements that a thread holds: 4 loads of 16 bytes under way, 80 registers, so 6 blocks of 4 warps on an SM."""
_BACKWARD_ELEMENTS = 16
"""Of each of two inputs and of the float32 sums, which live through the loop over rows."""


@dataclass(frozen=True)
class Tiling:
    """A tile is `rows` rows, each of `chunks` pieces of `chunk` columns; a block has `warps` warps.

    `blocks` is how many blocks for each multiprocessor share the tiles; 0 gives every tile a block of its own.
    """

    rows: int
    chunk: int
    chunks: int
    warps: int
    blocks: int

    @classmethod
    def of(cls, facts: NormFacts, knobs: Knobs) -> Tiling:
        named = dict(knobs)
        chunk, chunks = _chunks(facts, named["warps"])
        return cls(named["rows"], chunk, chunks, named["warps"], named["blocks"])

    @property
    def row_elements(self) -> float:
        """Elements of one row for each thread."""
        return self.chunk * self.chunks / (self.warps * _WARP)

    def grid(self, facts: NormFacts, sm_count: int) -> int:
        tiles = -(-facts.rows // self.rows)
        return min(tiles, self.blocks * sm_count) if self.blocks else tiles


def settings(facts: NormFacts, sm_count: int) -> list[Knobs]:
    """The knobs worth trying, the predicted best first."""
    if facts.direction == "fwd":
        made = _forward(facts, sm_count)
    else:
        made = _backward(facts, sm_count)
    return list(dict.fromkeys((("rows", rows), ("warps", warps), ("blocks", blocks)) for rows, warps, blocks in made))


def _forward(facts: NormFacts, sm_count: int) -> list[tuple[int, int, int]]:
    """Short of registers only in long rows, so 4 warps until a thread would hold more than it should."""
    warps = 4 if _elements(facts, 4) <= _FORWARD_ELEMENTS else 8
    rows = _rows(facts, warps, _FORWARD_ELEMENTS, 2 * sm_count)
    return [
        (rows, warps, 0),
        (_rows(facts, warps, 2 * _FORWARD_ELEMENTS, 2 * sm_count), warps, 0),
        (_rows(facts, 8, _FORWARD_ELEMENTS, 2 * sm_count), 8, 0),
        (rows, warps, 4),
    ]


def _backward(facts: NormFacts, sm_count: int) -> list[tuple[int, int, int]]:
    """Every block walks over many tiles, since each leaves a row of float32 sums behind."""
    rows = _rows(facts, 8, _BACKWARD_ELEMENTS, sm_count)
    if _elements(facts, 8) > _BACKWARD_ELEMENTS:
        # A block takes more than half of the registers of its multiprocessor.
        return [(rows, 8, 1), (rows, 8, 2), (rows, 8, 4)]
    more = _rows(facts, 8, 2 * _BACKWARD_ELEMENTS, sm_count)
    made = [(rows, 8, 2), (rows, 8, 4), (more, 8, 1)]
    if facts.dtype.itemsize_bits == 16:
        made.append((_rows(facts, 4, 2 * _BACKWARD_ELEMENTS, sm_count), 4, 2))
    return made


def _chunks(facts: NormFacts, warps: int) -> tuple[int, int]:
    """(columns of a piece, pieces): in a full piece every thread has one vector of 16 bytes."""
    full = warps * _WARP * _VECTOR_BYTES * 8 // facts.dtype.itemsize_bits
    return (full, -(-facts.cols // full)) if facts.cols > full else (_power_of_two(facts.cols), 1)


def _elements(facts: NormFacts, warps: int) -> float:
    """Elements of one row for each thread."""
    chunk, chunks = _chunks(facts, warps)
    return chunk * chunks / (warps * _WARP)


def _rows(facts: NormFacts, warps: int, elements: int, tiles: int) -> int:
    """The most rows, a power of two, of which a thread holds so many elements and that leave so many tiles."""
    rows = 1
    while 2 * rows * _elements(facts, warps) <= elements and -(-facts.rows // (2 * rows)) >= tiles:
        rows *= 2
    return rows


def _power_of_two(number: int) -> int:
    """The smallest that is not below the number."""
    return 1 << (number - 1).bit_length()
