"""Graphs as drawings: rails of characters, one column for each tensor that is still wanted, and Graphviz text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cudnn_jax.graph.canonical import is_input, is_output
from cudnn_jax.graph.names import printable
from cudnn_jax.graph.show import typed

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.pygraph import pygraph
    from cudnn_jax.graph.tensor import Tensor


def rails(graph: pygraph) -> str:
    """The graph from top to bottom: `o` a tensor, `*` where an operation takes one, `=>` what the caller gets."""
    last_use = {id(tensor): at for at, node in enumerate(graph.nodes) for tensor in node.inputs.values()}
    lanes: list[Tensor | None] = []
    rows: list[tuple[str, str]] = []

    def row(marks: dict[int, str], label: str) -> None:
        between = range(min(marks), max(marks))
        cells = [
            marks.get(at) or ("-" if at in between and not lane else "|" if lane else " ")
            for at, lane in enumerate(lanes)
        ]
        joined = "".join(cell + ("-" if at in between else " ") for at, cell in enumerate(cells))
        rows.append((joined.rstrip(), label))

    def open_lane(tensor: Tensor) -> None:
        if None not in lanes:
            lanes.append(None)
        lanes[lanes.index(None)] = tensor
        row({lanes.index(tensor): "o"}, f"{typed(tensor)}{'  =>' if is_output(tensor) else ''}")

    def close_lanes(tensors: Iterable[Tensor], at: int) -> None:
        for tensor in tensors:
            if tensor in lanes and last_use.get(id(tensor), at) <= at:
                lanes[lanes.index(tensor)] = None

    for at, node in enumerate(graph.nodes):
        taken = list(dict.fromkeys(node.inputs.values()))
        for tensor in taken:
            if tensor not in lanes and not tensor.is_pass_by_value:
                open_lane(tensor)
        columns = {lanes.index(tensor): "*" for tensor in taken if tensor in lanes}
        row(columns or {0: "*"}, _label(node))
        close_lanes(taken, at)
        for tensor in node.outputs.values():
            open_lane(tensor)
        close_lanes(node.outputs.values(), at)
    width = max((len(rail) for rail, _ in rows), default=0)
    return "\n".join(f"{rail:<{width}}  {label}" for rail, label in rows)


def _label(node: Node) -> str:
    numbers = [f"{port}={typed(tensor)}" for port, tensor in node.inputs.items() if tensor.is_pass_by_value]
    return f"{node.label}{'(' + ', '.join(numbers) + ')' if numbers else ''}"


def dot(graph: pygraph) -> str:
    """The graph in Graphviz' language: boxes are operations, ellipses what the caller gives and gets."""
    lines = [f"digraph {_quoted(printable(graph.name) or 'graph')} {{", '  node [shape=box, fontname="monospace"];']
    for at, node in enumerate(graph.nodes):
        lines.append(f"  n{at} [label={_quoted(_label(node))}];")
    maker = {id(tensor): f"n{at}" for at, node in enumerate(graph.nodes) for tensor in node.outputs.values()}
    ends: dict[str, str] = {}
    edges = []
    for at, node in enumerate(graph.nodes):
        for port, tensor in node.inputs.items():
            if is_input(tensor):
                ends[f"t{tensor.uid}"] = typed(tensor)
            source = maker.get(id(tensor), f"t{tensor.uid}")
            text = port if is_input(tensor) else f"{port}: {typed(tensor)}"
            edges += [f"  {source} -> n{at} [label={_quoted(text)}];"] if not tensor.is_pass_by_value else []
        for port, tensor in node.outputs.items():
            if is_output(tensor):
                ends[f"t{tensor.uid}"] = typed(tensor)
                edges.append(f"  n{at} -> t{tensor.uid} [label={_quoted(port)}];")
    lines += [f"  {name} [shape=ellipse, label={_quoted(label)}];" for name, label in ends.items()]
    return "\n".join([*lines, *edges, "}"])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
