"""The scales of `sdpa_mxfp8` and its backward: one for each block of 32, in memory in tiles of 128 x 4. Loads no JAX.

The tiles are cuDNN's F8_128x4 ("The 128x4 Tiled Layout for Block Scaling Factors", cudnn-frontend): rows are what is
not scaled, columns the blocks of what is; tiles follow each other along the columns, then along the rows.
"""

from __future__ import annotations

from cudnn_jax.graph import Node, data_type
from cudnn_jax.graph.layout import Dims, in_order

BLOCK = 32
TILE = (128, 4)
_TURNED = ("q_T", "k_T", "dO_T")


def scaled_axis(node: Node, port: str) -> int:
    """The axis along which blocks run: the one that the product with the operand sums over."""
    return 2 if port.endswith("_T") or (node.type, port) == ("SDPA_MXFP8", "descale_v") else 3


def tiled_dim(node: Node, port: str) -> Dims:
    """Dims of whole tiles."""
    batch, heads, *plane = node.inputs[port.removeprefix("descale_")].dim
    at = scaled_axis(node, port) - 2
    plane[at] = -(-plane[at] // BLOCK)
    padded = [-(-size // tile) * tile for size, tile in zip(plane, TILE if at else TILE[::-1], strict=True)]
    return batch, heads, *padded


def reason(node: Node) -> str | None:
    """Why the scales of a node are not read here, or None."""
    if pages := [port for port in node.inputs if port.startswith("paged_attention_")]:
        return f"{pages[0]}: of pages with block scales serves none"
    for port, tensor in node.inputs.items():
        if port in _TURNED and tensor.dim != (dim := node.inputs[port.removesuffix("_T")].dim):
            return f"{port} of dims {tensor.dim}, serves {dim}"
    for port in (port for port in node.inputs if port.startswith("descale_")):
        tensor, dim = node.inputs[port], tiled_dim(node, port)
        if tensor.data_type is not data_type.FP8_E8M0:
            return f"{port} of type {tensor.data_type.value}, serves {data_type.FP8_E8M0.value}"
        if tensor.dim != dim:
            return f"{port} of dims {tensor.dim}, serves whole tiles: {dim}"
        dense = [in_order(dim, order) for order in ((0, 1, 2, 3), (0, 1, 3, 2))]
        if tensor.stride not in dense:
            return f"{port} of strides {tensor.stride}, serves {dense[0]} and {dense[1]}"
        if scaled_axis(node, port) == 2 and dim[3] > TILE[0]:
            # Frontend and samples disagree on whether such tiles follow each other within a head or over all of them.
            return f"{port} of {dim[3]} columns, serves one tile of {TILE[0]}: of several the order is unsure"
    return None
