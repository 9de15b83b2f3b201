"""The graph: tensors, operations from declarative tables, validation, freezing and the canonical form.

Standard library only. `cudnn_jax.pygraph` is this graph with planning on top.
"""

from cudnn_jax.graph.builders import OPERATIONS
from cudnn_jax.graph.errors import GraphFrozenError, GraphNotSupportedError, GraphValidationError
from cudnn_jax.graph.node import Node
from cudnn_jax.graph.operation import Operation
from cudnn_jax.graph.pygraph import pygraph
from cudnn_jax.graph.tensor import Tensor
from cudnn_jax.graph.types import data_type

__all__ = [
    "OPERATIONS",
    "GraphFrozenError",
    "GraphNotSupportedError",
    "GraphValidationError",
    "Node",
    "Operation",
    "Tensor",
    "data_type",
    "pygraph",
]
