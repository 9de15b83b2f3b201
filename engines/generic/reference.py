"""The generic reference: a graph evaluated node by node in JAX, inlined into the caller's program.

A node reads its inputs in its compute type, but where it only moves elements, and writes its results in its outputs'
data types, virtual or not, by the conversions of the pointwise reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax

from cudnn_jax.engines import manifest
from cudnn_jax.engines.base import Inline, PlanConfig
from cudnn_jax.engines.generic import _attention, _elements, _folds, _products, limits
from cudnn_jax.engines.generic._step import Made, Step
from cudnn_jax.engines.pointwise.reference import Evaluator, node_by_node
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import Node, Tensor, data_type, pygraph

if TYPE_CHECKING:
    from cudnn_jax.engines.generic.facts import GenericFacts

_MODULES = (_attention, _elements, _folds, _products)
FUNCTIONS: dict[str, Callable[[Step], Made]] = {
    kind: next(getattr(module, name) for module in _MODULES if hasattr(module, name))
    for kind, name in limits.FUNCTIONS.items()
}
"""Node type -> its function."""


def evaluator(graph: pygraph, facts: GenericFacts, target: Target) -> Evaluator:
    """The function of a frozen graph; see `node_by_node`."""
    typed = zip(graph.nodes, facts.compute_types, strict=True)
    return node_by_node(graph, facts.dtypes, [_run(node, compute, target) for node, compute in typed])


def _run(node: Node, compute: data_type, target: Target) -> Callable[[dict[str, jax.Array]], Made]:
    """The node as a function of the arrays at its ports."""
    if node.type in FUNCTIONS:
        return lambda given: FUNCTIONS[node.type](Step(node, compute, given))
    other = limits.delegate(node)
    assert other is not None
    graph, engine = other.alone.graph, other.engine
    artifact = engine.build_plan(graph, manifest.facts_of(graph, other.family), PlanConfig(engine.engine_id), target)
    assert isinstance(artifact, Inline)
    ports = [_port_of(node.inputs, tensor) for tensor in other.alone.inputs]
    results = [_port_of(node.outputs, tensor) for tensor in other.alone.outputs]
    return lambda given: dict(zip(results, artifact.fn(*(given[port] for port in ports)), strict=True))


def _port_of(ports: Mapping[str, Tensor], tensor: Tensor) -> str:
    return next(port for port, wired in ports.items() if wired is tensor)
