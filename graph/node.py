"""An operation of a graph: its entry in the tables, its ports and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cudnn_jax.graph.errors import GraphFrozenError
from cudnn_jax.graph.names import as_name
from cudnn_jax.graph.show import node_line
from cudnn_jax.graph.tensor import Tensor
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.operation import Input, Operation
    from cudnn_jax.graph.pygraph import pygraph


class Node:
    """One operation. Ports and parameters can be read, never written; the name may change until the freeze."""

    __slots__ = ("__weakref__", "_compute_data_type", "_graph", "_inputs", "_name", "_operation", "_outputs", "_params")

    def __init__(
        self,
        graph: pygraph,
        operation: Operation,
        name: str,
        inputs: dict[str, Tensor],
        outputs: dict[str, Tensor],
        params: dict[str, Any],
        compute_data_type: data_type,
    ) -> None:
        self._graph = graph
        self._operation = operation
        self._name = name
        self._inputs = inputs
        self._outputs = outputs
        self._params = params
        self._compute_data_type = compute_data_type

    @property
    def operation(self) -> Operation:
        """The table entry that this node is an instance of."""
        return self._operation

    @property
    def type(self) -> str:
        """The kind of node, such as "MATMUL", "POINTWISE" or "SDPA": its operation's type."""
        return self._operation.type

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        if self._graph.frozen:
            raise GraphFrozenError(f"node {self.label}: name cannot change; the graph is frozen")
        self._graph._changed()
        self._name = as_name(self.label, name)

    @property
    def label(self) -> str:
        """The name for people: the operation's, and the node's own if it has one."""
        return f"{self._operation.name} {self._name!r}" if self._name else self._operation.name

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """The wired input ports, in the table's order."""
        return MappingProxyType(self._inputs)

    @property
    def wired(self) -> tuple[tuple[Input, str, Tensor], ...]:
        """(the table's port, the port's name, the tensor) of each wired input port, in order."""
        return tuple(
            (port, name, self._inputs[name])
            for port in self._operation.inputs
            for name in takewhile(self._inputs.__contains__, port.names)
        )

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        """The output ports that exist, in the table's order."""
        return MappingProxyType(self._outputs)

    @property
    def written_over(self) -> Mapping[str, str]:
        """Output port -> the input port whose buffer it is, written over."""
        ports = {output.name: output.over for output in self._operation.outputs if output.over}
        return {name: port for name, (flag, port) in ports.items() if name in self._outputs and self._params[flag]}

    @property
    def params(self) -> Mapping[str, Any]:
        """Every attribute of the operation, defaults filled in; a pointwise node's mode is among them."""
        return MappingProxyType(self._params)

    @property
    def compute_data_type(self) -> data_type:
        """The type to compute in; NOT_SET means the graph's."""
        return self._compute_data_type

    def __reduce__(self) -> tuple[Any, ...]:
        return _node_of, (self._graph, self._graph.nodes.index(self))

    def __repr__(self) -> str:
        return node_line(self)


def _node_of(graph: pygraph, position: int) -> Node:
    return graph.nodes[position]
