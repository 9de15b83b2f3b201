"""Dims as symbols: "B N T D" binds or checks four symbols, "~B N T S" checks that a tensor broadcasts to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from cudnn_jax.graph.errors import GraphValidationError
from cudnn_jax.graph.layout import Dims, in_order, memory_order, row_major
from cudnn_jax.graph.operation import Layout, Symbols

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.tensor import Tensor


def refuse(node: Node, port: str, came: str, rule: str) -> NoReturn:
    raise GraphValidationError(f"{node.label}: {port} {came}; the rule: {rule}")


def match(node: Node, port: str, tensor: Tensor, shape: str, symbols: Symbols) -> None:
    """Checks a tensor against `shape`; symbols not known yet take their value from it."""
    spread = shape.startswith("~")
    names = shape.removeprefix("~").split()
    rule = f"{'broadcastable to ' if spread else ''}({', '.join(names)})"
    if len(tensor.dim) != len(names):
        refuse(node, port, f"has dim {tensor.dim}, rank {len(tensor.dim)}", f"rank {len(names)}, {rule}")
    for name, size in zip(names, tensor.dim, strict=True):
        expected = _size(name, symbols)
        if expected is None:
            if not spread:
                symbol, _, more = name.partition("+")
                symbols[symbol] = size - int(more or 0)
        elif size != expected and not (spread and size == 1):
            bare = dict.fromkeys(name.partition("+")[0] for name in names)
            known = ", ".join(f"{symbol} = {symbols[symbol]}" for symbol in bare if symbol in symbols)
            refuse(node, port, f"has dim {tensor.dim}", f"{rule} with {known}" if known else rule)


def _size(name: str, symbols: Symbols) -> int | None:
    """The value of "B", "B+1" or "1"; None while the symbol is unknown."""
    if name.isdigit():
        return int(name)
    symbol, _, more = name.partition("+")
    known = symbols.get(symbol)
    return None if known is None else known + int(more or 0)


def dims_of(shape: str, symbols: Symbols) -> Dims:
    """The dims of a shape whose symbols are all known."""
    return tuple(int(name) if name.isdigit() else symbols[name] for name in shape.split())


def dense(shape: str, like: str | None = None) -> Callable[[Node, Symbols], Layout]:
    """Infers `shape`, dense, row-major or in the memory order of the input port `like`."""

    def infer(node: Node, symbols: Symbols) -> Layout:
        dim = dims_of(shape, symbols)
        if like is None:
            return dim, row_major(dim)
        return ordered_as(dim, node.inputs[like])

    return infer


def same_as(port: str) -> Callable[[Node, Symbols], Layout]:
    """Infers the dims and strides of an input port."""

    def infer(node: Node, symbols: Symbols) -> Layout:
        return node.inputs[port].dim, node.inputs[port].stride

    return infer


def has_dim(port: str, expected: Callable[[Node], Dims], what: str) -> Callable[[Node, Symbols], None]:
    """The rule that a port, where it is wired, has the expected dims, which are `what`."""

    def rule(node: Node, symbols: Symbols) -> None:
        if port in node.inputs and node.inputs[port].dim != expected(node):
            refuse(node, port, f"has dim {node.inputs[port].dim}", f"{expected(node)}, {what}")

    return rule


def ordered_as(dim: Dims, model: Tensor) -> Layout:
    """`dim` with dense strides in the memory order of a tensor of the same rank."""
    return dim, in_order(dim, memory_order(model.dim, model.stride))


def set_by_caller(output: str, check: Callable[[Node, Dims], None], like: str) -> Callable[[Node, Symbols], Layout]:
    """The dims that the caller sets on an output, once it has, after `check`; in the memory order of port `like`."""

    def infer(node: Node, symbols: Symbols) -> Layout:
        dim = node.outputs[output]._dim
        if dim is None:
            return (), ()
        check(node, dim)
        model = node.inputs[like]
        return ordered_as(dim, model) if len(model.dim) == len(dim) else (dim, row_major(dim))

    return infer


def _port_of(node: Node, symbol: str) -> str:
    """The first port whose dims name the symbol."""
    return next(p.name for p in node.operation.inputs if p.shape and symbol in p.shape.split())


def at_least_one(*names: str) -> Callable[[Node, Symbols], None]:
    """The rule that these symbols are not 0."""

    def rule(node: Node, symbols: Symbols) -> None:
        for name in names:
            if symbols.get(name) == 0:
                refuse(node, _port_of(node, name), f"has {name} = 0", f"{', '.join(names)} are at least 1")

    return rule


def multiple(of: str, unit: str) -> Callable[[Node, Symbols], None]:
    """The rule that one symbol is a multiple of another."""

    def rule(node: Node, symbols: Symbols) -> None:
        if symbols[of] % symbols[unit]:
            came = f"has {of} = {symbols[of]}, where {unit} = {symbols[unit]}"
            refuse(node, _port_of(node, of), came, f"{of} is a multiple of {unit}")

    return rule
