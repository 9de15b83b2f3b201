"""Takes a builder call apart, by its operation's entry: tensors to ports, plain values to parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from cudnn_jax.graph.errors import GraphNotSupportedError, GraphValidationError, shown
from cudnn_jax.graph.kinds import number
from cudnn_jax.graph.names import as_name
from cudnn_jax.graph.operation import Input, Operation
from cudnn_jax.graph.tensor import Tensor
from cudnn_jax.graph.types import data_type


class Call(NamedTuple):
    """A call, taken apart. `given` are output tensors that the caller made; `label` is the node's, for errors."""

    label: str
    name: str
    compute_data_type: data_type
    inputs: dict[str, Tensor]
    given: dict[str, Tensor]
    params: dict[str, Any]


def restore(
    operation: Operation,
    name: str,
    compute_data_type: Any,
    ports: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    params: Mapping[str, Any],
) -> Call:
    """The call of a node with these ports, outputs of the caller and parameters, as `node` tells them."""
    arguments: dict[str, Any] = {**ports, **given, **params}
    for port in operation.inputs:
        if port.many:
            numbered = [arguments.pop(each) for each in takewhile(ports.__contains__, port.names)]
            arguments |= {port.name: numbered} if numbered else {}
    return _call(operation, name, compute_data_type, arguments, {})


def _call(
    operation: Operation,
    name: str | None,
    compute_data_type: Any,
    arguments: dict[str, Any],
    expand: Mapping[str, Callable[[Any], Mapping[str, Any]]],
) -> Call:
    name = as_name(operation.name, name)
    label = f"{operation.name} {name!r}" if name else operation.name
    try:
        compute = data_type.of(compute_data_type)
        for keyword, apart in expand.items():
            if keyword in arguments:
                arguments |= {k: v for k, v in apart(arguments.pop(keyword)).items() if v is not None}
        call = Call(label, name, compute, *_ports(operation, arguments), _params(operation, arguments))
        if operation.settle is not None:
            operation.settle(call.params)
    except GraphNotSupportedError:
        raise
    except ValueError as error:
        raise GraphValidationError(f"{label}: {error}") from None
    return call


def capture(operation: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The call, or a GraphValidationError that names the keyword."""
    arguments = _bind(operation, args, kwargs)
    name = arguments.pop("name", None)
    return _call(operation, name, arguments.pop("compute_data_type", None), arguments, operation.expand)


def _bind(operation: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name; None counts as absent."""
    if len(args) > len(operation.arguments):
        raise GraphValidationError(
            f"{operation.name}: {len(args)} positional arguments; the rule: at most {len(operation.arguments)}"
        )
    bound = dict(zip(operation.arguments, args, strict=False))
    known = {*operation.arguments, *operation.keyword_only}
    for keyword, value in kwargs.items():
        if keyword not in known:
            close = [name for name in (*operation.arguments, *operation.keyword_only) if name not in bound]
            raise GraphValidationError(
                f"{operation.name}: unknown keyword {keyword!r}; the rule: one of {', '.join(close)}"
            )
        if keyword in bound:
            raise GraphValidationError(f"{operation.name}: {keyword} came twice, by position and by keyword")
        bound[keyword] = value
    return {name: value for name, value in bound.items() if value is not None}


def _ports(operation: Operation, arguments: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    inputs: dict[str, Tensor] = {}
    for port in operation.inputs:
        value = arguments.get(port.name)
        if port.many:
            inputs |= _numbered(port, arguments.pop(port.name, ()))
        elif isinstance(value, Tensor):
            inputs[port.name] = arguments.pop(port.name)
        elif value is None and not port.optional:
            kinds = "a tensor or a number" if port.number else "a tensor"
            raise ValueError(f"{port.name} is missing; the rule: {kinds}")
        elif value is not None and not port.number:
            raise ValueError(f"{port.name} is {value!r}; the rule: a tensor of this graph")
    given = {}
    for output in operation.outputs:
        value = arguments.pop(output.name, None) if output.from_caller else None
        if isinstance(value, Tensor):
            given[output.name] = value
        elif value is not None:
            raise ValueError(f"{output.name} is {value!r}; the rule: a tensor of this graph, made for it")
    return inputs, given


def _numbered(port: Input, value: Any) -> dict[str, Tensor]:
    tensors = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(tensor, Tensor) for tensor in tensors) or not (tensors or port.optional):
        raise ValueError(f"{port.name} is {value!r}; the rule: a sequence of tensors of this graph, at least one")
    return dict(zip(port.names, tensors, strict=False))


def _params(operation: Operation, arguments: dict[str, Any]) -> dict[str, Any]:
    """All parameters with their defaults; what is left of `arguments` must be parameters."""
    parsers = {port.name: number for port in operation.inputs if port.number}
    parsers |= {attribute.name: attribute.kind for attribute in operation.attributes}
    params = {**operation.fixed, **operation.defaults}
    for name, value in arguments.items():
        if name not in parsers:
            raise ValueError(f"{name} is unknown; the rule: one of {', '.join(parsers) or 'none'}")
        kind = parsers[name]
        try:
            params[name] = kind.parse(value)
        except GraphNotSupportedError as error:
            raise GraphNotSupportedError(f"{operation.name}: {name}: {error}") from None
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{name} is {shown(value)}; the rule: {kind.rule}") from None
    for attribute in operation.attributes:
        if attribute.required and params[attribute.name] is None:
            raise ValueError(f"{attribute.name} is missing; the rule: {attribute.kind.rule}")
    return params
