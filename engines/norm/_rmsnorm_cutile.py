"""cuTile kernels of RMS norm over a row-major matrix. Arithmetic is float32; what bounds them is in the notes beside.

A row is CHUNKS tiles of CHUNK columns, so that rows of 5120 or 7168 need no masked half. Bounds are checked only where
a tile can reach past the matrix: in the last chunk of a row, and in the last rows if RAGGED. What lies past it is read
as zero, which no sum sees. Optional arrays that are absent come as the constant False.
"""

from __future__ import annotations

import cuda.tile as ct

Static = ct.Constant


def _pad(CHECK):
    """tileiras 13.4 fails on a padding where bounds are not checked."""
    return ct.PaddingMode.ZERO if CHECK else ct.PaddingMode.UNDETERMINED


def _load_chunk(array, tile, at, ROWS, CHUNK, CHECK):
    return ct.load(array, (tile, at), (ROWS, CHUNK), padding_mode=_pad(CHECK), check_bounds=CHECK, allow_tma=False)


def _load_rows(array, tile, ROWS, CHUNK, FIRST, CHUNKS, COLS, CHECK):
    """The rows' chunks from FIRST on, (ROWS, CHUNK) each, in the array's type: half the registers of float32."""
    chunks = ()
    for at in ct.static_iter(range(FIRST, CHUNKS)):
        chunks = (*chunks, _load_chunk(array, tile, at, ROWS, CHUNK, CHECK or _past(at, CHUNK, COLS)))
    return chunks


def _load_column(array, tile, ROWS, CHECK):
    column = ct.load(array, (tile,), (ROWS,), padding_mode=_pad(CHECK), check_bounds=CHECK, allow_tma=False)
    return ct.reshape(column, (ROWS, 1))


def _load_weight(array, at, CHUNK, CHECK):
    """A chunk of a vector of one row, (1, CHUNK), in float32."""
    chunk = ct.load(array, (at,), (CHUNK,), padding_mode=_pad(CHECK), check_bounds=CHECK, allow_tma=False)
    return _wide(ct.reshape(chunk, (1, CHUNK)))


def _past(at, CHUNK, COLS):
    return (at + 1) * CHUNK > COLS


def _wide(tile):
    return ct.astype(tile, ct.float32)


def _square(chunk):
    return _wide(chunk) * _wide(chunk)


def _write_normal(chunk, inverse, scale, bias, y, tile, at, CHUNK, SCALE, BIAS, CHECK, PAST):
    made = _wide(chunk) * inverse
    if SCALE:
        made = made * _load_weight(scale, at, CHUNK, PAST)
    if BIAS:
        made = made + _load_weight(bias, at, CHUNK, PAST)
    ct.store(y, (tile, at), ct.astype(made, y.dtype), check_bounds=CHECK or PAST, allow_tma=False)


def _forward_rows(
    x, scale, bias, y, inv_var, ROWS, CHUNK, CHUNKS, STEP, STEPS, COLS, EPSILON, SCALE, BIAS, STATISTICS, CHECK
):
    tile = ct.bid(0)
    HELD = STEP * STEPS
    rows = _load_rows(x, tile, ROWS, CHUNK, HELD, CHUNKS, COLS, CHECK)
    squares = ct.zeros((ROWS, CHUNK), ct.float32)
    if STEPS:
        # From 0: a loop whose length the compiler knows may be unrolled, and then all chunks are held in registers.
        for step in range(tile >> 30, STEPS):
            for at in ct.static_iter(range(STEP)):
                squares = squares + _square(_load_chunk(x, tile, step * STEP + at, ROWS, CHUNK, CHECK))
    for at in ct.static_iter(range(CHUNKS - HELD)):
        squares = squares + _square(rows[at])
    inverse = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) * (1.0 / COLS) + EPSILON)
    if STEPS:
        for step in range(tile >> 30, STEPS):
            for at in ct.static_iter(range(STEP)):
                place = step * STEP + at
                chunk = _load_chunk(x, tile, place, ROWS, CHUNK, CHECK)
                _write_normal(chunk, inverse, scale, bias, y, tile, place, CHUNK, SCALE, BIAS, CHECK, False)
    for at in ct.static_iter(range(HELD, CHUNKS)):
        chunk = rows[at - HELD]
        _write_normal(chunk, inverse, scale, bias, y, tile, at, CHUNK, SCALE, BIAS, CHECK, _past(at, CHUNK, COLS))
    if STATISTICS:
        ct.store(inv_var, (tile,), ct.reshape(inverse, (ROWS,)), check_bounds=CHECK, allow_tma=False)


def rms_norm_forward(
    x,
    scale,
    bias,
    y,
    inv_var,
    ROWS: Static[int],
    CHUNK: Static[int],
    CHUNKS: Static[int],
    STEP: Static[int],
    STEPS: Static[int],
    COLS: Static[int],
    EPSILON: Static[float],
    SCALE: Static[bool],
    BIAS: Static[bool],
    STATISTICS: Static[bool],
    RAGGED: Static[bool],
):
    """Of a long row the first STEPS * STEP chunks are read twice, the second time out of the L1 cache."""
    arrays = (x, scale, bias, y, inv_var)
    constants = (ROWS, CHUNK, CHUNKS, STEP, STEPS, COLS, EPSILON, SCALE, BIAS, STATISTICS)
    if RAGGED:
        if ct.bid(0) == ct.num_blocks(0) - 1:
            _forward_rows(*arrays, *constants, True)
        else:
            _forward_rows(*arrays, *constants, False)
    else:
        _forward_rows(*arrays, *constants, False)


def _load_tile(grad, x, inv_variance, tile, ROWS, CHUNK, CHUNKS, COLS, CHECK):
    grads = _load_rows(grad, tile, ROWS, CHUNK, 0, CHUNKS, COLS, CHECK)
    rows = _load_rows(x, tile, ROWS, CHUNK, 0, CHUNKS, COLS, CHECK)
    return grads, rows, _load_column(inv_variance, tile, ROWS, CHECK)


def _backward_rows(
    loaded, weights, scale, dx, parts, tile, ROWS, CHUNK, CHUNKS, COLS, SCALE, DSCALE, DBIAS, KEEP, CHECK
):
    """Writes the rows of dx; returns the sums for the gradients with these rows in them."""
    grads, rows, inverse = loaded
    scale_parts, bias_parts = parts
    # Read again for every row where they are not kept: the compiler hoists a load unless its index depends on the loop.
    shift = tile >> 30
    products = ct.zeros((ROWS, CHUNK), ct.float32)
    for at in ct.static_iter(range(CHUNKS)):
        inner = _wide(grads[at])
        if SCALE:
            inner = inner * (weights[at] if KEEP else _load_weight(scale, at + shift, CHUNK, _past(at, CHUNK, COLS)))
        products = products + inner * _wide(rows[at])
    # The mean of inner * normal, times inverse once more for the second factor of normal.
    shared = ct.sum(products, axis=1, keepdims=True) * (inverse * inverse * (1.0 / COLS))
    grown_scales = grown_biases = ()
    for at in ct.static_iter(range(CHUNKS)):
        taken, row = _wide(grads[at]), _wide(rows[at])
        if DSCALE:
            grown_scales = (*grown_scales, scale_parts[at] + taken * (row * inverse))
        if DBIAS:
            grown_biases = (*grown_biases, bias_parts[at] + taken)
        if SCALE:
            taken = taken * (weights[at] if KEEP else _load_weight(scale, at + shift, CHUNK, _past(at, CHUNK, COLS)))
        made = ct.astype((taken - row * shared) * inverse, dx.dtype)
        ct.store(dx, (tile, at), made, check_bounds=CHECK or _past(at, CHUNK, COLS), allow_tma=False)
    return grown_scales, grown_biases


def rms_norm_backward(
    grad,
    x,
    scale,
    inv_variance,
    dx,
    scale_sums,
    bias_sums,
    ROWS: Static[int],
    CHUNK: Static[int],
    CHUNKS: Static[int],
    COLS: Static[int],
    SCALE: Static[bool],
    DSCALE: Static[bool],
    DBIAS: Static[bool],
    KEEP: Static[bool],
    AHEAD: Static[bool],
    RAGGED: Static[bool],
):
    """Writes dx, and for each block the float32 sums over its rows that the gradients of the weights are made of.

    KEEP holds the scale in registers; AHEAD loads a tile while the one before it is worked on.
    """
    weights = ()
    if SCALE and KEEP:
        for at in ct.static_iter(range(CHUNKS)):
            weights = (*weights, _load_weight(scale, at, CHUNK, _past(at, CHUNK, COLS)))
    # Summed over the rows of a tile only once, behind the loop: a sum across threads costs barriers.
    scale_parts = bias_parts = ()
    for _ in ct.static_iter(range(CHUNKS)):
        if DSCALE:
            scale_parts = (*scale_parts, ct.zeros((ROWS, CHUNK), ct.float32))
        if DBIAS:
            bias_parts = (*bias_parts, ct.zeros((ROWS, CHUNK), ct.float32))
    parts = (scale_parts, bias_parts)
    first, step, whole = ct.bid(0), ct.num_blocks(0), x.shape[0] // ROWS
    inputs, sizes = (grad, x, inv_variance), (ROWS, CHUNK, CHUNKS, COLS)
    flags = (SCALE, DSCALE, DBIAS, KEEP)
    if AHEAD:
        coming = _load_tile(*inputs, ct.minimum(first, whole - 1), *sizes, False)
        for tile in range(first, whole, step):
            loaded = coming
            coming = _load_tile(*inputs, ct.minimum(tile + step, whole - 1), *sizes, False)
            parts = _backward_rows(loaded, weights, scale, dx, parts, tile, *sizes, *flags, False)
    else:
        for tile in range(first, whole, step):
            loaded = _load_tile(*inputs, tile, *sizes, False)
            parts = _backward_rows(loaded, weights, scale, dx, parts, tile, *sizes, *flags, False)
    if RAGGED:
        for tile in range(whole + first, ct.cdiv(x.shape[0], ROWS), step):
            loaded = _load_tile(*inputs, tile, *sizes, True)
            parts = _backward_rows(loaded, weights, scale, dx, parts, tile, *sizes, *flags, True)
    scale_parts, bias_parts = parts
    for at in ct.static_iter(range(CHUNKS)):
        if DSCALE:
            _store_sums(scale_sums, at, scale_parts[at], ROWS, _past(at, CHUNK, COLS))
        if DBIAS:
            _store_sums(bias_sums, at, bias_parts[at], ROWS, _past(at, CHUNK, COLS))


def _store_sums(sums, at, tile, ROWS, CHECK):
    if ROWS > 1:
        tile = ct.sum(tile, axis=0, keepdims=True)
    ct.store(sums, (ct.bid(0), at), tile, check_bounds=CHECK, allow_tma=False)


def rms_norm_reduce(sums, gradient, ROWS: Static[int], CHUNK: Static[int], TILES: Static[int]):
    """Adds the blocks' sums, (TILES * ROWS or fewer, cols), in a fixed order."""
    total = ct.zeros((ROWS, CHUNK), ct.float32)
    for tile in range(TILES):
        total = total + ct.load(
            sums, (tile, ct.bid(0)), (ROWS, CHUNK), padding_mode=ct.PaddingMode.ZERO, allow_tma=False
        )
    ct.store(gradient, (ct.bid(0),), ct.astype(ct.sum(total, axis=0), gradient.dtype), allow_tma=False)
