"""What a norm graph is, read once after the freeze. Facts describe and never judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

from cudnn_jax.graph import Tensor, data_type, pygraph
from cudnn_jax.graph.layout import in_order
from cudnn_jax.graph.normalised import epsilon_of, normalised_axes

Dims = tuple[int, ...]
_WEIGHTS = ("scale", "bias", "DScale", "DBias")
_STATISTICS = ("inv_variance", "inv_var")


@dataclass(frozen=True)
class NormFacts:
    """One record for an RMS norm graph, forward or backward.

    `dim` are the input's dims and `axes` the normalised ones. `ports` and `results` map names to positions in
    `graph.inputs` and `graph.outputs`, `dtypes` every port's and result's name to its type. `compute` is the type that
    the node computes in. `epsilon` is 0 for a backward graph, which has none.

    As a matrix the input has `rows` (the product of the axes that are kept) and `cols` (of the normalised ones).
    `scattered` names the ports and results whose memory is not that matrix in row-major order: the input, Y, grad and
    DX whole, weights and their gradients one row of it, statistics one column.
    """

    direction: str
    dim: Dims
    axes: Dims
    dtype: data_type
    compute: data_type
    epsilon: float
    dtypes: Mapping[str, data_type] = field(hash=False)
    scattered: tuple[str, ...]
    unexplained: tuple[str, ...]
    ports: Mapping[str, int] = field(hash=False)
    results: Mapping[str, int] = field(hash=False)

    @property
    def rows(self) -> int:
        return prod(size for axis, size in enumerate(self.dim) if axis not in self.axes)

    @property
    def cols(self) -> int:
        return prod(self.dim[axis] for axis in self.axes)

    def describe(self) -> str:
        """One line for people."""
        words = [f"rmsnorm {self.direction} {self.dtype.value} {self.dim} over axes {self.axes}"]
        words += [name for name in ("bias",) if name in self.ports]
        words += [name for name in ("inv_var", "DBias") if name in self.results]
        return " ".join(words)


def _order(tensor: Tensor) -> Dims | None:
    """Axes longer than 1 from slowest to fastest; None if the memory has gaps or shares elements."""
    moving = [axis for axis, size in enumerate(tensor.dim) if size != 1]
    order = sorted(moving, key=lambda axis: -tensor.stride[axis])
    dense = in_order(tensor.dim, order)
    return tuple(order) if all(tensor.stride[axis] == dense[axis] for axis in moving) else None


def _scattered(named: Mapping[str, Tensor], axes: Sequence[int]) -> tuple[str, ...]:
    order = _order(named["input"])
    if order is None:
        return ("input",)
    kept = tuple(axis for axis in order if axis not in axes)
    normalised = tuple(axis for axis in order if axis in axes)
    if order != (*kept, *normalised):
        return ("input",)
    expected = {name: normalised for name in _WEIGHTS} | {name: kept for name in _STATISTICS}
    return tuple(name for name, tensor in named.items() if _order(tensor) != expected.get(name, order))


def analyze(graph: pygraph) -> NormFacts:
    """Parses a frozen graph that holds one RMS_NORM or RMS_NORM_BACKWARD node."""
    (node,) = [n for n in graph.nodes if n.type in ("RMS_NORM", "RMS_NORM_BACKWARD")]
    x, axes = node.inputs["input"], normalised_axes(node)
    inputs = {name: tensor for name, tensor in node.inputs.items() if name != "epsilon"}
    tensors = {**inputs, **node.outputs}
    ports, results = _positions(inputs, graph.inputs), _positions(node.outputs, graph.outputs)
    unexplained = [n.name or n.type for n in graph.nodes if n is not node]
    unexplained += [f"port {name} as a number" for name in inputs if name not in ports]
    unexplained += ["ragged offsets"] if any(t.ragged_offset is not None for t in tensors.values()) else []
    return NormFacts(
        direction="bwd" if node.type == "RMS_NORM_BACKWARD" else "fwd",
        dim=x.dim,
        axes=axes,
        dtype=x.data_type,
        compute=graph.compute_data_type if node.compute_data_type is data_type.NOT_SET else node.compute_data_type,
        epsilon=epsilon_of(node) or 0.0,
        dtypes=MappingProxyType({name: tensor.data_type for name, tensor in tensors.items()}),
        scattered=_scattered(tensors, axes),
        unexplained=tuple(unexplained),
        ports=MappingProxyType(ports),
        results=MappingProxyType(results),
    )


def _positions(named: Mapping[str, Tensor], ordered: Sequence[Tensor]) -> dict[str, int]:
    """name -> position in `ordered`, for the tensors that are in it."""
    position = {id(tensor): index for index, tensor in enumerate(ordered)}
    return {name: position[id(tensor)] for name, tensor in named.items() if id(tensor) in position}
