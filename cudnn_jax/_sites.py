"""Where a function calls operations of this package: what `explain` plans, `aot.build` builds and `autotune` times."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from cudnn_jax.engines.planning import Planned, plan
from cudnn_jax.engines.target import Target
from cudnn_jax.ops import _primitive

Known = dict[Any, Callable[[], Any]]
"""Variable of a jaxpr -> what gives its value."""


@dataclass(frozen=True)
class Site:
    """One distinct operation of a traced function: its operands' shapes and options, and how often it occurs.

    `known` gives the values of those operands that the function's arguments settle, at the first place where the
    operation occurs: arguments and constants that reach it unchanged, and integers and booleans that are computed of
    such alone.
    """

    operation: _primitive.Operation
    operands: Mapping[str, jax.ShapeDtypeStruct]
    config: Any
    notes: tuple[str, ...]
    count: int
    known: Mapping[str, Callable[[], Any]] = field(compare=False, repr=False)

    def built(self) -> _primitive.BuiltGraph:
        return self.operation.build(self.config, self.operands)

    def graph(self) -> Any:
        return self.built().graph

    def plan(self, target: Target) -> Planned:
        return plan(self.graph(), target, self.config.implementation)


def sites(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Site]:
    """Traces `fn` on arrays or `jax.ShapeDtypeStruct`s; nothing runs. In the order of the traced function.

    Where XLA partitions the program over a mesh, `fn` is compiled, and operands are what one device holds of them.

    Keywords of a function that is not jitted stay as they are, unless they hold arrays only.
    """
    if hasattr(fn, "trace"):
        run, arrays = fn, kwargs
    else:
        static = {name: value for name, value in kwargs.items() if not _holds_arrays(value)}
        arrays = {name: value for name, value in kwargs.items() if name not in static}
        run = jax.jit(functools.partial(fn, **static))
    traced, given = run.trace(*args, **arrays).jaxpr, jax.tree.leaves((args, arrays))
    by_name = {f"cudnn_jax.{name}": operation for name, operation in _primitive.OPERATIONS.items()}
    found: dict[Any, Site] = {}
    for eqn, known in _equations(traced.jaxpr, _arguments(traced, given)):
        if eqn.primitive.name in by_name:
            operation, avals = by_name[eqn.primitive.name], [var.aval for var in eqn.invars]
            key = _primitive.call_key(operation, avals, **eqn.params)
            earlier = found.get(key) or _site(operation, eqn, known)
            found[key] = replace(earlier, count=earlier.count + 1)
    if found and _is_spread(traced.jaxpr, given):
        return _on_one_device(found, run, args, arrays)
    return list(found.values())


def _site(operation: _primitive.Operation, eqn: Any, known: Known) -> Site:
    names, config, notes = (eqn.params[each] for each in ("names", "config", "notes"))
    operands = dict(zip(names, eqn.invars, strict=True))
    shapes = {name: jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for name, var in operands.items()}
    settled = {name: value for name, atom in operands.items() if (value := _value(atom, known))}
    return Site(operation, shapes, config, notes, 0, settled)


def _is_spread(jaxpr: Any, given: Sequence[Any]) -> bool:
    """Whether a mesh of several devices occurs: of an argument, around the function or in one of its equations."""
    shardings = [getattr(x, "sharding", None) for x in given]
    for eqn, _ in _equations(jaxpr, {}):
        shardings += jax.tree.leaves([value for name, value in eqn.params.items() if "sharding" in name])
    meshes = [getattr(each, "mesh", None) for each in shardings] + [jax.sharding.get_abstract_mesh()]
    return any(mesh is not None and mesh.size > 1 for mesh in meshes)


def _on_one_device(found: Mapping[Any, Site], run: Any, args: Any, arrays: Any) -> list[Site]:
    """Sites as XLA partitions them, which it does while it compiles; those of `shard_map` are so already."""
    seen = _primitive.Partitioned()
    with _primitive.partitioned(seen):
        run.trace(*args, **arrays).lower().compile({"xla_backend_optimization_level": 0})
    return [each for key, site in found.items() for each in _shares(site, Counter(seen.of(key)))]


def _shares(site: Site, seen: Counter[tuple[tuple[int, ...], ...]]) -> Iterator[Site]:
    """The site as it was partitioned; where that was in several ways, each way with its own count."""
    if not seen:
        yield site
    for shapes, count in seen.items():
        local = zip(site.operands.items(), shapes, strict=True)
        operands = {name: jax.ShapeDtypeStruct(shape, whole.dtype) for (name, whole), shape in local}
        yield replace(
            site,
            operands=operands,
            notes=(*site.notes, "XLA partitions it: this is the share of one device"),
            count=count if len(seen) > 1 else site.count,
            known={name: value for name, value in site.known.items() if operands[name] == site.operands[name]},
        )


def _holds_arrays(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves)


def _equations(jaxpr: Any, known: Known) -> Iterator[tuple[Any, Known]]:
    """Every equation, those of inner functions behind the one that holds them, with the values known at its place."""
    for eqn in jaxpr.eqns:
        yield eqn, known
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _equations(inner, _handed_on(eqn, inner, known))
        _settle(eqn, known)


# Values

_OF_AXES = ("pvary", "pcast")
"""Equations inside `shard_map` that change what is known of a value's axes, and not the value."""


def _arguments(traced: Any, given: list[Any]) -> Known:
    """Of constants and of arguments that are there. A function with static arguments hides which are which."""
    pairs = [*zip(traced.jaxpr.constvars, traced.consts, strict=True)]
    if len(given) == len(traced.jaxpr.invars):
        pairs += zip(traced.jaxpr.invars, given, strict=True)
    return {var: functools.partial(jnp.asarray, value) for var, value in pairs if _is_there(value)}


def _is_there(value: Any) -> bool:
    return not isinstance(value, jax.ShapeDtypeStruct | jax.core.Tracer)


def _value(atom: Any, known: Known) -> Callable[[], Any] | None:
    if isinstance(atom, core.Literal):
        return functools.partial(jnp.asarray, atom.val, atom.aval.dtype)
    return known.get(atom)


def _handed_on(eqn: Any, inner: Any, known: Known) -> Known:
    """What an inner function knows. Its arguments are the equation's last; in a loop, this holds the first time round.

    An argument of another shape is a part of what was handed on.
    """
    given = eqn.invars[len(eqn.invars) - len(inner.invars) :] if len(inner.invars) <= len(eqn.invars) else []
    return {
        var: value
        for var, atom in zip(inner.invars, given, strict=False)
        if (value := _value(atom, known)) and (var.aval.shape, var.aval.dtype) == (atom.aval.shape, atom.aval.dtype)
    }


def _settle(eqn: Any, known: Known) -> None:
    """Adds an equation's results where it makes integers and booleans of known values. They are computed when asked."""
    values = [value for atom in eqn.invars if (value := _value(atom, known))]
    plain = not eqn.effects and not eqn.primitive.name.startswith("custom_")
    if len(values) < len(eqn.invars) or not plain or not all(map(_is_discrete, eqn.outvars)):
        return
    results = functools.cache(functools.partial(_evaluate, eqn, values))
    for at, var in enumerate(eqn.outvars):
        known[var] = functools.partial(_one_of, results, at)


def _is_discrete(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.integer) or var.aval.dtype == jnp.bool_


def _evaluate(eqn: Any, values: list[Callable[[], Any]]) -> list[Any]:
    if eqn.primitive.name in _OF_AXES:
        return [value() for value in values]
    results = eqn.primitive.bind(*(value() for value in values), **eqn.params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _one_of(results: Callable[[], list[Any]], at: int) -> Any:
    return results()[at]
