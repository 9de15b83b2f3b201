"""Where a function calls operations of this package: what `explain` plans and `aot.build` builds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from cudnn_jax.engines.planning import Planned, plan
from cudnn_jax.engines.target import Target
from cudnn_jax.ops import _primitive


@dataclass(frozen=True)
class Site:
    """One distinct operation of a traced function: its operands' shapes and options, and how often it occurs."""

    operation: _primitive.Operation
    operands: Mapping[str, jax.ShapeDtypeStruct]
    config: Any
    notes: tuple[str, ...]
    count: int

    def graph(self) -> Any:
        return self.operation.build(self.config, self.operands).graph

    def plan(self, target: Target) -> Planned:
        return plan(self.graph(), target, self.config.implementation)


def sites(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Site]:
    """Traces `fn` on arrays or `jax.ShapeDtypeStruct`s; nothing runs. In the order of the traced function.

    Keywords of a function that is not jitted stay as they are, unless they hold arrays only.
    """
    if hasattr(fn, "trace"):
        traced = fn.trace(*args, **kwargs).jaxpr
    else:
        static = {name: value for name, value in kwargs.items() if not _holds_arrays(value)}
        arrays = {name: value for name, value in kwargs.items() if name not in static}
        traced = jax.make_jaxpr(functools.partial(fn, **static))(*args, **arrays)
    by_name = {f"cudnn_jax.{name}": operation for name, operation in _primitive.OPERATIONS.items()}
    counts: dict[tuple[Any, ...], int] = {}
    for eqn in _equations(traced.jaxpr):
        if eqn.primitive.name in by_name:
            avals = tuple((var.aval.shape, var.aval.dtype) for var in eqn.invars)
            params = eqn.params
            key = (eqn.primitive.name, params["names"], avals, params["config"], params["notes"])
            counts[key] = counts.get(key, 0) + 1
    return [
        Site(
            operation=by_name[name],
            operands={each: jax.ShapeDtypeStruct(*aval) for each, aval in zip(names, avals, strict=True)},
            config=config,
            notes=notes,
            count=count,
        )
        for (name, names, avals, config, notes), count in counts.items()
    ]


def _holds_arrays(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _equations(inner)
