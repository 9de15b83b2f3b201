"""What the cuTile kernels of this room do with tiles: products, loads and stores of parts, and beta's sigmoid."""

from __future__ import annotations

import cuda.tile as ct

C = 64
"""Tokens of a chunk."""


def wide(tile):
    return ct.astype(tile, ct.float32)


def product(x, y):
    """Into an accumulator of its own: one that holds a scaled tile may make tileiras 13.4 wait for each instruction."""
    return ct.mma(x, y, ct.zeros((x.shape[0], y.shape[1]), ct.float32))


def rows_of(array, start, stop):
    """The rows start to stop of an array. Their offset is worked out in the type of `start`, so it must be 64 bits."""
    return array.slice(axis=0, start=ct.astype(start, ct.int64), stop=ct.astype(stop, ct.int64))


def token(array, at):
    return ct.astype(ct.gather(array, (at,)), ct.int32)


def load_rows(array, at, head, column, WIDTH, LATENCY):
    """Chunk `at` of one head of a sequence (tokens, heads, dim), columns from column * WIDTH on: (C, WIDTH)."""
    index, shape = (at, head, column), (C, 1, WIDTH)
    return ct.reshape(ct.load(array, index, shape, padding_mode=ct.PaddingMode.ZERO, latency=LATENCY), (C, WIDTH))


def store_rows(array, at, head, column, tile):
    ct.store(array, (at, head, column), ct.reshape(tile, (C, 1, tile.shape[1])))


def load_part(array, place, row, column, ROWS, COLS, LATENCY=None):
    """Part of a matrix of an array (places, rows, columns)."""
    index, shape = (place, row, column), (1, ROWS, COLS)
    tile = ct.load(array, index, shape, padding_mode=ct.PaddingMode.ZERO, latency=LATENCY)
    return ct.reshape(tile, (ROWS, COLS))


def store_part(array, place, row, column, tile):
    ct.store(array, (place, row, column), ct.reshape(tile, (1, tile.shape[0], tile.shape[1])))


def load_numbers(array, place):
    """A number for each row of a chunk, (C, 1), of an array (places, C)."""
    return ct.load(array, (0, place), (C, 1), order=(1, 0), check_bounds=False, allow_tma=False)


def store_numbers(array, first, tokens, head, tile):
    """A chunk's column of numbers into an array (total, heads)."""
    row = ct.arange(C, dtype=ct.int32)
    ct.scatter(array, (first + row, head), ct.astype(ct.reshape(tile, (C,)), array.dtype), mask=row < tokens)


def strength(logits, DOUBLE):
    """beta of its logits."""
    return (2.0 if DOUBLE else 1.0) / (1.0 + ct.exp(-logits))


def through_strength(d_rate, rate, DOUBLE):
    """The gradient of beta's logits from that of beta, which is `rate`."""
    return d_rate * rate * (1.0 - rate * (0.5 if DOUBLE else 1.0))
