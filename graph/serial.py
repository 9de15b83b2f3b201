"""A graph to JSON text and back: everything that its user said, with names and uids, and nothing that is inferred.

The text is the same in every process and on every Python. A graph that is read back is open, has the canonical form
of the one that was written, and is written as the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from cudnn_jax.graph import canonical, kinds
from cudnn_jax.graph.builders import OPERATIONS
from cudnn_jax.graph.call import restore
from cudnn_jax.graph.errors import GraphValidationError
from cudnn_jax.graph.tensor import Tensor
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.operation import Operation
    from cudnn_jax.graph.pygraph import pygraph

Graph = TypeVar("Graph", bound="pygraph")

VERSION = 1
_TYPES = ("io_data_type", "intermediate_data_type", "compute_data_type")
_SETTINGS = {
    "dim": "_dim",
    "stride": "_stride",
    "data_type": "_data_type",
    "is_virtual": "_is_virtual",
    "is_pass_by_value": "_is_pass_by_value",
    "value": "_value",
}
"""Attribute -> where a tensor keeps what its user said of it."""


def to_json(graph: pygraph) -> str:
    """The graph as JSON text."""
    return canonical.to_json(_form_of(graph))


def changed(graph: Graph, change: Callable[[Tensor], Mapping[str, Any]]) -> Graph:
    """The graph again, open, with other settings of each tensor: those that `change` gives in place of its own."""
    form = _form_of(graph)
    for tensor, spec in zip(graph.tensors, form["tensors"], strict=True):
        spec |= change(tensor)
    return _made_of(type(graph), form)


def _form_of(graph: pygraph) -> dict[str, Any]:
    index = {id(tensor): position for position, tensor in enumerate(graph.tensors)}
    return {
        "version": VERSION,
        "name": graph.name,
        **{name: _plain(getattr(graph, name)) for name in _TYPES},
        "tensors": [_tensor(graph, tensor, index) for tensor in graph.tensors],
        "nodes": [_node(node, index) for node in graph.nodes],
    }


def _tensor(graph: pygraph, tensor: Tensor, index: Mapping[int, int]) -> dict[str, Any]:
    offset = tensor.ragged_offset
    return {
        "name": tensor.name,
        "uid": tensor.uid,
        "uid_is_users": graph._uids.is_users(tensor),
        "ragged_offset": None if offset is None else index[id(offset)],
        **{name: _plain(getattr(tensor, kept)) for name, kept in _SETTINGS.items()},
    }


def _node(node: Node, index: Mapping[int, int]) -> dict[str, Any]:
    given = canonical.given_params(node)
    return {
        "operation": node.operation.name,
        "name": node.name,
        "compute_data_type": _plain(node.compute_data_type),
        "inputs": {port: index[id(tensor)] for port, tensor in node.inputs.items()},
        "outputs": {port: index[id(tensor)] for port, tensor in node.outputs.items()},
        "params": {name: _plain(value) for name, value in given.items() if name not in node.operation.fixed},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, data_type):
        return None if value is data_type.NOT_SET else value.value
    return canonical.plain(value)


def from_json(kind: type[Graph], text: str) -> Graph:
    """The graph, of class `kind`, that `to_json` wrote.

    Raises:
      GraphValidationError: the text is none, or of another version, or the graph breaks a rule; the message says where.
    """
    return _made_of(kind, _form(text))


def _made_of(kind: type[Graph], form: dict[str, Any]) -> Graph:
    where = "graph text"
    try:
        graph = kind(form["name"], **{name: form[name] for name in _TYPES})
        specs = form["tensors"]
        tensors: dict[int, Tensor] = {}
        made = {index for node in form["nodes"] for index in _made(node).values()}
        for index, spec in enumerate(specs):
            where = f"graph text: tensors[{index}]"
            if index not in made:
                tensors[index] = Tensor(graph, "")
                graph._register(tensors[index])
                _apply(tensors[index], spec)
        for at, spec in enumerate(form["nodes"]):
            where = f"graph text: nodes[{at}]"
            node = _placed(graph, spec, tensors)
            for port, index in _made(spec).items():
                tensors[index] = node.outputs[port]
                _apply(tensors[index], specs[index])
        where = "graph text: tensors"
        graph._restore([(tensors[index], spec["uid"], spec["uid_is_users"]) for index, spec in enumerate(specs)])
        for index, spec in enumerate(specs):
            if spec["ragged_offset"] is not None:
                tensors[index].ragged_offset = tensors[spec["ragged_offset"]]
    except GraphValidationError as error:
        raise GraphValidationError(f"{where}: {error}") from None
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise GraphValidationError(
            f"{where}: {type(error).__name__}: {error}; the rule: as to_json writes it"
        ) from None
    return graph


def _form(text: str) -> dict[str, Any]:
    import json  # slow to import, and needed by few

    try:
        form = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise GraphValidationError(f"graph text is no JSON: {error}") from None
    if not isinstance(form, dict) or form.get("version") != VERSION:
        came = form.get("version") if isinstance(form, dict) else type(form).__name__
        raise GraphValidationError(f"graph text has version {came!r}; the rule: {VERSION}, as to_json writes it")
    return form


def _operation(spec: Mapping[str, Any]) -> Operation:
    name = spec["operation"]
    if name not in OPERATIONS:
        raise GraphValidationError(f"operation is {name!r}; the rule: one of the tables'")
    return OPERATIONS[name]


def _made(spec: Mapping[str, Any]) -> dict[str, int]:
    """The node's outputs that are not the caller's own: port -> index."""
    operation = OPERATIONS.get(spec["operation"])
    own = {output.name for output in operation.outputs if output.from_caller} if operation else set()
    return {port: index for port, index in spec["outputs"].items() if port not in own}


def _placed(graph: pygraph, spec: Mapping[str, Any], tensors: Mapping[int, Tensor]) -> Node:
    operation = _operation(spec)
    made = _made(spec)
    ports = {port: tensors[index] for port, index in spec["inputs"].items()}
    given = {port: tensors[index] for port, index in spec["outputs"].items() if port not in made}
    params = {name: _number(operation, name, value) for name, value in spec["params"].items()}
    node = graph._place(operation, restore(operation, spec["name"], spec["compute_data_type"], ports, given, params))
    if set(node.outputs) != set(spec["outputs"]):
        came, rule = ", ".join(spec["outputs"]) or "none", ", ".join(node.outputs)
        raise GraphValidationError(f"outputs are {came}; the rule: {rule}")
    return node


def _number(operation: Operation, name: str, value: Any) -> Any:
    """JSON's spelling of an infinity or NaN, as a number where the parameter is one."""
    numbers = {port.name for port in operation.inputs if port.number}
    numbers |= {attribute.name for attribute in operation.attributes if attribute.kind is kinds.number}
    return float(value) if name in numbers and value in ("inf", "-inf", "nan") else value


def _apply(tensor: Tensor, spec: Mapping[str, Any]) -> None:
    tensor.name = spec["name"]
    for name in _SETTINGS:
        value = spec[name]
        if name == "value" and isinstance(value, str):
            value = float(value)
        if value is not None:
            setattr(tensor, name, value)
