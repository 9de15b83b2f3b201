"""The pattern residual + gelu(x + bias): finds it in a graph, in every spelling, and describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

from cudnn_jax.graph import Node, Tensor, data_type, pygraph
from cudnn_jax.graph.layout import row_major

_GELU = {"gelu": "erf", "gelu_approx_tanh": "tanh"}
_GIVEN = ("x", "bias", "residual")
_ADD = {"bias": ("input", "bias"), "add": ("a", "b")}
"""Modes that add two tensors, and their ports."""


@dataclass(frozen=True)
class BiasGelu:
    """out = residual + gelu(x + bias); bias, residual, or both may be absent.

    As a matrix x has `rows` (the product of all axes but the last) and `cols`; bias is one row of it, residual and the
    results are matrices. `ports` maps "x", "bias" and "residual" to positions in `graph.inputs`, `results` maps "out"
    and "pre" (x + bias, where the graph gives it) to positions in `graph.outputs`, and `dtypes` all of these to their
    types.

    Attributes:
      approximation: "erf" for the exact function, "tanh".
      inner_types: types of the computation and of tensors inside the graph.
      scattered: names whose memory is not the row-major matrix, or the row.
    """

    rows: int
    cols: int
    approximation: str
    inner_types: tuple[data_type, ...]
    scattered: tuple[str, ...]
    dtypes: Mapping[str, data_type] = field(hash=False)
    ports: Mapping[str, int] = field(hash=False)
    results: Mapping[str, int] = field(hash=False)

    @property
    def dtype(self) -> data_type:
        """The type of x."""
        return self.dtypes["x"]

    def describe(self) -> str:
        """One line for people."""
        name = "gelu" if self.approximation == "erf" else "gelu_approx_tanh"
        words = [name, self.dtype.value, f"({self.rows}, {self.cols})"]
        words += [f"with {port}" for port in ("bias", "residual") if port in self.ports]
        words += ["giving x + bias"] if "pre" in self.results else []
        return " ".join(words)


def find(graph: pygraph, compute: Sequence[data_type]) -> BiasGelu | str:
    """The pattern, or in words what the graph has in its place.

    Args:
      graph: frozen, of pointwise nodes alone.
      compute: the type that each node computes in.
    """
    gelus = [node for node in graph.nodes if node.params["mode"] in _GELU]
    if len(gelus) != 1:
        return f"holds {len(gelus)} gelu nodes"
    (gelu,) = gelus
    pre, activated = gelu.inputs["input"], gelu.outputs["OUT_0"]
    before, after = pre.producer, _reader(graph, activated)
    left = [node for node in graph.nodes if node not in (gelu, before, after)]
    if left:
        return f"holds {left[0].params['mode']} as well"

    named = {"x": pre, "out": activated}
    if before is not None:
        operands = _operands(before, pre)
        if operands is None:
            return f"has {before.params['mode']} of {_dims(before)} before the gelu"
        named["x"], named["bias"] = operands
    if after is not None:
        ports = _ADD.get(after.params["mode"])
        if ports is None or not activated.is_virtual:
            return f"has {after.params['mode']} behind the gelu" if ports is None else "gives the gelu as well"
        (residual,) = [after.inputs[port] for port in ports if after.inputs[port] is not activated] or [activated]
        named |= {"residual": residual, "out": after.outputs["OUT_0"]}
    if before is not None and not pre.is_virtual:
        named["pre"] = pre
    return _record(graph, gelu, named, compute)


def _record(graph: pygraph, gelu: Node, named: dict[str, Tensor], compute: Sequence[data_type]) -> BiasGelu | str:
    inputs = {id(tensor): position for position, tensor in enumerate(graph.inputs)}
    outputs = {id(tensor): position for position, tensor in enumerate(graph.outputs)}
    ports = {name: inputs[id(tensor)] for name, tensor in named.items() if name in _GIVEN and id(tensor) in inputs}
    results = {name: outputs[id(tensor)] for name, tensor in named.items() if name not in _GIVEN}
    made = [name for name in named if name in _GIVEN and name not in ports]
    if made:
        return f"has {made[0]} that is no input of the graph"
    shape = gelu.outputs["OUT_0"].dim
    odd = [name for name, tensor in named.items() if name != "bias" and _bare(tensor.dim) != _bare(shape)]
    if odd:
        return f"has {odd[0]} of {named[odd[0]].dim} beside {shape}"
    given = {id(tensor) for tensor in named.values()}
    inner = [tensor.data_type for node in graph.nodes for tensor in node.outputs.values() if id(tensor) not in given]
    return BiasGelu(
        rows=prod(shape[:-1]),
        cols=shape[-1],
        approximation=_GELU[gelu.params["mode"]],
        inner_types=tuple(dict.fromkeys([*compute, *inner])),
        scattered=tuple(name for name, tensor in named.items() if not _packed(tensor)),
        dtypes=MappingProxyType({name: tensor.data_type for name, tensor in named.items()}),
        ports=MappingProxyType(ports),
        results=MappingProxyType(results),
    )


def _reader(graph: pygraph, tensor: Tensor) -> Node | None:
    """The node that reads a tensor, the first if there are several."""
    return next((node for node in graph.nodes if any(t is tensor for t in node.inputs.values())), None)


def _operands(node: Node, out: Tensor) -> tuple[Tensor, Tensor] | None:
    """(x, bias) of a node that adds a row to a matrix, the row being either operand; None for any other node."""
    pairs = [_ADD[node.params["mode"]]] if node.params["mode"] in _ADD else []
    pairs += [(b, a) for a, b in pairs]
    for whole, row in pairs:
        x, bias = node.inputs[whole], node.inputs[row]
        if _bare(x.dim) == _bare(out.dim) and set(bias.dim[:-1]) <= {1} and bias.dim[-1] == out.dim[-1]:
            return x, bias
    return None


def _bare(dim: tuple[int, ...]) -> tuple[int, ...]:
    """Dims without the leading ones, which place nothing."""
    first = next((axis for axis, size in enumerate(dim) if size != 1), len(dim) - 1)
    return tuple(dim[first:])


def _packed(tensor: Tensor) -> bool:
    dense = row_major(tensor.dim)
    return all(
        size == 1 or stride == expected for size, stride, expected in zip(tensor.dim, tensor.stride, dense, strict=True)
    )


def _dims(node: Node) -> str:
    return " and ".join(str(tensor.dim) for tensor in node.inputs.values())
