"""How the cuTile RMS norm cuts a matrix: settings in the order in which an H200 was measured to be fast."""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_jax.engines.norm.facts import NormFacts

Knobs = tuple[tuple[str, int], ...]

_VECTOR_BYTES = 16
_WARP = 32
_SM_REGISTERS = 65536
_SHORT_VECTORS = 4
"""Rows of up to so many vectors for each thread of a warp belong to one warp: no barrier in the sum of a row."""
_FORWARD_ELEMENTS = 16
"""That a thread holds where a tile has several rows."""
_FORWARD_WARPS = 24
"""That an SM has at a time, which leaves a thread 80 registers."""
_HELD_BYTES = 16384
"""Of a row. In longer rows all but the last pieces are read twice, so that three blocks of 8 warps fit on an SM."""
_REREAD = 2
"""Pieces in a step of that loop, and the most that are held beside it."""
_BACKWARD = ((4, 4, 32.0), (4, 3, 48.0), (4, 2, 64.0), (8, 2, 64.0), (8, 1, 192.0))
"""(warps, blocks for each multiprocessor, most registers that x, grad and the sums of a thread take), best first."""
_BACKWARD_WORDS = 32
"""The registers that a tile of several rows may take."""


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

    def grid(self, facts: NormFacts, sm_count: int) -> int:
        tiles = -(-facts.rows // self.rows)
        return min(tiles, self.blocks * sm_count) if self.blocks else tiles

    def ragged(self, facts: NormFacts) -> bool:
        """Whether the last tile reaches past the rows."""
        return facts.rows % self.rows != 0

    def reread(self, facts: NormFacts) -> tuple[int, int]:
        """(pieces in a step, steps) of the part of a row that forward reads twice."""
        return (_REREAD, (self.chunks - 1) // _REREAD) if _row_bytes(facts) > _HELD_BYTES else (1, 0)

    @property
    def hints(self) -> dict[str, int]:
        """What the compiler is told of a kernel over the tiles: its warps, and how many blocks an SM is to hold."""
        return {"num_worker_warps": self.warps, "occupancy": self.blocks or _FORWARD_WARPS // self.warps}

    def room(self, facts: NormFacts) -> tuple[bool, bool]:
        """Backward: whether there are registers for the scale through the loop, and for a tile that is loaded ahead.

        Half of them are the compiler's. Alone on an SM, a block has none beside it that loads while it computes, so
        the tile ahead may take more and goes first.
        """
        budget = _SM_REGISTERS / (self.blocks * self.warps * _WARP)
        columns = self.chunk * self.chunks / (self.warps * _WARP)
        base = self.rows * columns * _words(facts)
        ahead = self.rows * columns * 2 * facts.dtype.itemsize_bits / 32
        keep = columns * facts.dtypes["scale"].itemsize_bits / 32 if "scale" in facts.dtypes else 0.0
        if base + keep + ahead < budget / 2:
            return True, True
        if self.blocks == 1 and base + ahead <= budget * 5 / 8:
            return False, True
        return base + keep < budget / 2, False


def settings(facts: NormFacts, sm_count: int) -> list[Knobs]:
    """The knobs worth trying, the measured best first."""
    made = _forward(facts, sm_count) if facts.direction == "fwd" else _backward(facts, sm_count)
    return list(dict.fromkeys((("rows", rows), ("warps", warps), ("blocks", blocks)) for rows, warps, blocks in made))


def _forward(facts: NormFacts, sm_count: int) -> list[tuple[int, int, int]]:
    if _row_bytes(facts) > _HELD_BYTES / 2:
        return [(1, 8, 0)]
    return [(_rows(facts, warps, _FORWARD_ELEMENTS, 2 * sm_count), warps, 0) for warps in (4, 8)]


def _backward(facts: NormFacts, sm_count: int) -> list[tuple[int, int, int]]:
    """Every block walks over many tiles, since each leaves a row of float32 sums behind."""
    words = _words(facts)
    fitting = [(warps, blocks) for warps, blocks, most in _BACKWARD if words * _elements(facts, warps) <= most]
    elements = int(_BACKWARD_WORDS / words)
    return [(_rows(facts, warps, elements, sm_count), warps, blocks) for warps, blocks in fitting[:2]]


def _words(facts: NormFacts) -> float:
    """Registers for each element: of x, grad and the float32 sums."""
    return 2 * facts.dtype.itemsize_bits / 32 + len({"DScale", "DBias"} & set(facts.results))


def _row_bytes(facts: NormFacts) -> int:
    return facts.cols * facts.dtype.itemsize_bits // 8


def _chunks(facts: NormFacts, warps: int) -> tuple[int, int]:
    """(columns of a piece, pieces).

    In one piece of a row of medium length each of 128 threads has a vector of 16 bytes, or each of 256 half a vector:
    fewer columns are padded, and the sums of backward, which end as one row, stay where they are.
    """
    vector = _VECTOR_BYTES * 8 // facts.dtype.itemsize_bits
    if facts.cols <= _SHORT_VECTORS * _WARP * vector:
        chunk = min(_WARP * vector, 1 << (facts.cols - 1).bit_length())
    else:
        chunk = (4 if _row_bytes(facts) <= _HELD_BYTES else warps) * _WARP * vector
    return chunk, -(-facts.cols // chunk)


def _elements(facts: NormFacts, warps: int) -> float:
    """Elements of one row for each thread."""
    chunk, chunks = _chunks(facts, warps)
    return chunk * chunks / (warps * _WARP)


def _rows(facts: NormFacts, warps: int, elements: int, tiles: int) -> int:
    """The most rows, a power of two, of which a thread holds so many elements and that leave so many whole tiles."""
    rows = 1
    while 2 * rows * _elements(facts, warps) <= elements and facts.rows // (2 * rows) >= tiles:
        rows *= 2
    return rows
