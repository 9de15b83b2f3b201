"""cuTile kernels of RMS norm over a row-major matrix. Arithmetic is float32; what bounds them is in the notes beside.

A row is CHUNKS tiles of CHUNK columns, so that rows of 5120 or 7168 need no masked half; a chunk that reaches past the
row is padded with zeros, which no sum sees. Optional arrays that are absent come as the constant False.
"""

from __future__ import annotations

import cuda.tile as ct

Static = ct.Constant
_ZERO = ct.PaddingMode.ZERO


def _load_rows(array, tile, ROWS, CHUNK, CHUNKS):
    """The rows' chunks, (ROWS, CHUNK) each, in the array's type: half the registers of float32."""
    chunks = ()
    for at in ct.static_iter(range(CHUNKS)):
        chunks = (*chunks, ct.load(array, (tile, at), (ROWS, CHUNK), padding_mode=_ZERO, allow_tma=False))
    return chunks


def _load_weights(array, CHUNK, CHUNKS):
    """The chunks of a vector of one row, (1, CHUNK) each, in its type."""
    chunks = ()
    for at in ct.static_iter(range(CHUNKS)):
        chunks = (*chunks, _load_weight(array, at, CHUNK))
    return chunks


def _load_weight(array, at, CHUNK):
    return ct.reshape(ct.load(array, (at,), (CHUNK,), padding_mode=_ZERO, allow_tma=False), (1, CHUNK))


def _wide(tile):
    return ct.astype(tile, ct.float32)


def _forward_rows(x, scale, bias, y, inv_var, tile, ROWS, CHUNK, CHUNKS, COLS, EPSILON, SCALE, BIAS, STATISTICS):
    rows = _load_rows(x, tile, ROWS, CHUNK, CHUNKS)
    squares = ct.zeros((ROWS, CHUNK), ct.float32)
    for at in ct.static_iter(range(CHUNKS)):
        squares = squares + _wide(rows[at]) * _wide(rows[at])
    inverse = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) * (1.0 / COLS) + EPSILON)
    for at in ct.static_iter(range(CHUNKS)):
        made = _wide(rows[at]) * inverse
        if SCALE:
            made = made * _wide(scale[at])
        if BIAS:
            made = made + _wide(bias[at])
        ct.store(y, (tile, at), ct.astype(made, y.dtype), allow_tma=False)
    if STATISTICS:
        ct.store(inv_var, (tile,), ct.reshape(inverse, (ROWS,)), allow_tma=False)


def rms_norm_forward(
    x,
    scale,
    bias,
    y,
    inv_var,
    ROWS: Static[int],
    CHUNK: Static[int],
    CHUNKS: Static[int],
    COLS: Static[int],
    EPSILON: Static[float],
    SCALE: Static[bool],
    BIAS: Static[bool],
    STATISTICS: Static[bool],
    PERSISTENT: Static[bool],
):
    scales = biases = ()
    if SCALE:
        scales = _load_weights(scale, CHUNK, CHUNKS)
    if BIAS:
        biases = _load_weights(bias, CHUNK, CHUNKS)
    if PERSISTENT:
        for tile in range(ct.bid(0), ct.cdiv(x.shape[0], ROWS), ct.num_blocks(0)):
            _forward_rows(
                x, scales, biases, y, inv_var, tile, ROWS, CHUNK, CHUNKS, COLS, EPSILON, SCALE, BIAS, STATISTICS
            )
    else:
        _forward_rows(
            x, scales, biases, y, inv_var, ct.bid(0), ROWS, CHUNK, CHUNKS, COLS, EPSILON, SCALE, BIAS, STATISTICS
        )


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
):
    """Writes dx, and for each block the float32 sums over its rows that the gradients of the weights are made of."""
    weights = ()
    if SCALE and KEEP:
        weights = _load_weights(scale, CHUNK, CHUNKS)
    # Summed over the rows of a tile only once, behind the loop: a sum across threads costs barriers.
    scale_parts = bias_parts = ()
    for _ in ct.static_iter(range(CHUNKS)):
        scale_parts = (*scale_parts, ct.zeros((ROWS, CHUNK), ct.float32))
        bias_parts = (*bias_parts, ct.zeros((ROWS, CHUNK), ct.float32))
    for tile in range(ct.bid(0), ct.cdiv(x.shape[0], ROWS), ct.num_blocks(0)):
        grads = _load_rows(grad, tile, ROWS, CHUNK, CHUNKS)
        rows = _load_rows(x, tile, ROWS, CHUNK, CHUNKS)
        inverse = ct.reshape(ct.load(inv_variance, (tile,), (ROWS,), padding_mode=_ZERO, allow_tma=False), (ROWS, 1))
        products = ct.zeros((ROWS, CHUNK), ct.float32)
        for at in ct.static_iter(range(CHUNKS)):
            inner = _wide(grads[at])
            if SCALE:
                inner = inner * _wide(weights[at] if KEEP else _load_weight(scale, at + (tile >> 30), CHUNK))
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
                taken = taken * _wide(weights[at] if KEEP else _load_weight(scale, at + (tile >> 30), CHUNK))
            made = (taken - row * shared) * inverse
            ct.store(dx, (tile, at), ct.astype(made, dx.dtype), allow_tma=False)
        if DSCALE:
            scale_parts = grown_scales
        if DBIAS:
            bias_parts = grown_biases
    for at in ct.static_iter(range(CHUNKS)):
        if DSCALE:
            ct.store(scale_sums, (ct.bid(0), at), _column_sums(scale_parts[at], ROWS), allow_tma=False)
        if DBIAS:
            ct.store(bias_sums, (ct.bid(0), at), _column_sums(bias_parts[at], ROWS), allow_tma=False)


def _column_sums(tile, ROWS):
    if ROWS == 1:
        return tile
    return ct.sum(tile, axis=0, keepdims=True)


def rms_norm_reduce(sums, gradient, ROWS: Static[int], CHUNK: Static[int], TILES: Static[int]):
    """Adds the blocks' sums, (TILES * ROWS or fewer, cols), in a fixed order."""
    total = ct.zeros((ROWS, CHUNK), ct.float32)
    for tile in range(TILES):
        total = total + ct.load(sums, (tile, ct.bid(0)), (ROWS, CHUNK), padding_mode=_ZERO, allow_tma=False)
    ct.store(gradient, (ct.bid(0),), ct.astype(ct.sum(total, axis=0), gradient.dtype), allow_tma=False)
