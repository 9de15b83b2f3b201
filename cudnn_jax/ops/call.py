"""`cudnn_jax.call`: any graph as a JAX function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from cudnn_jax.engines.manifest import family_for
from cudnn_jax.engines.planner import subject
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.program import is_dense, storage_order
from cudnn_jax.graph import Tensor
from cudnn_jax.graph.differentiation import Backward, Differentiable
from cudnn_jax.graph.folded import Folded, fold
from cudnn_jax.graph.names import printable
from cudnn_jax.ops import _arguments as check
from cudnn_jax.ops._derivative import REFERENCE
from cudnn_jax.ops._primitive import Avals, BuiltGraph, Operation, match_manual_axes, reference, register


@dataclass(frozen=True)
class CallConfig:
    """A frozen graph, told apart by what it computes."""

    digest: str
    graph: pygraph = field(compare=False, repr=False)
    implementation: str | None = None
    by_rows: bool = False
    """Whether `vmap` may make more rows of it."""


def call(graph: pygraph, *arrays: Any, implementation: str | None = None) -> tuple[jax.Array, ...]:
    """Runs a graph on JAX arrays, eagerly or under `jax.jit`.

    Arrays have the logical dims of their tensors. Where a tensor's strides are not row-major, the array is transposed
    on its way in or out, and `explain` says so. Reverse mode (`jax.grad`) runs a graph too, the transpose of this one,
    where every node between the inputs and the outputs in question has a derivative; so do further derivatives. With
    `implementation="xla"` there are forward mode and `vmap` as well, and where a node has no derivative JAX's own is
    taken.

    Args:
      graph: a `cudnn_jax.pygraph`; it is frozen by the call.
      *arrays: one for each of `graph.inputs`, in that order, with their dims and data types.
      implementation: None for the ranked plan list; else "cudnn", "cutedsl", "cutile", "xla", or the name of an
        engine or plan.

    Returns:
      One array for each of `graph.outputs`, in that order.

    Raises:
      TypeError, ValueError: an array does not fit its tensor; the message names both.
      GraphValidationError: the graph breaks a rule of its own.
      GraphNotSupportedError: no engine serves the graph, and the message holds every engine's reason; or
        `implementation` names none, and it holds the names.
      NotImplementedError: a node has no derivative, and the message names it; or forward mode, or `vmap`.
    """
    return run(graph, *arrays, implementation=implementation)


def run(graph: pygraph, *arrays: Any, implementation: str | None, by_rows: bool = False) -> tuple[jax.Array, ...]:
    """As `call`. With `by_rows`, `vmap` folds into the rows of the graph's tensors, which axis 0 counts.

    Where it cannot, as of weights that are mapped too, the graph is plain JAX under `vmap` if no implementation is
    asked for.
    """
    if not isinstance(graph, pygraph):
        raise TypeError(f"graph is {type(graph).__name__}; the rule: a cudnn_jax.pygraph")
    implementation = check.implementation(implementation, family_for(graph), subject(graph))
    graph.freeze()
    inputs, outputs = graph.inputs, graph.outputs
    if not inputs:
        raise ValueError("graph has no inputs; the rule: at least one")
    if len(arrays) != len(inputs):
        wanted = ", ".join(map(_label, inputs))
        raise ValueError(f"{len(arrays)} arrays came; the rule: one for each of {len(inputs)} inputs: {wanted}")
    for tensor in (*inputs, *outputs):
        _check_representable(tensor)
    pairs = enumerate(zip(arrays, inputs, strict=True))
    operands = {_name("in", at): _fitted(array, tensor) for at, (array, tensor) in pairs}
    return tuple(_run(CallConfig(graph.hash(), graph, implementation, by_rows), match_manual_axes(operands)))


def _run(config: CallConfig, operands: Mapping[str, Any]) -> list[jax.Array]:
    """The outputs of a graph; what is copied on its way in or out is noted."""
    graph = config.graph
    notes = tuple(note for tensor in (*graph.inputs, *graph.outputs) if (note := _copied(tensor)))
    return list(CALL.bind(config, operands, notes).values())


def _with(config: CallConfig, graph: pygraph) -> CallConfig:
    """Another graph with the same options."""
    graph.freeze()
    return replace(config, digest=graph.hash(), graph=graph)


def _name(side: str, position: int) -> str:
    return f"{side}{position}"


def _label(tensor: Tensor) -> str:
    name = f"{printable(tensor.name)} " if tensor.name else ""
    return f"{name}{tensor.data_type.value}{list(tensor.dim)}"


def _check_representable(tensor: Tensor) -> None:
    if not is_dense(tensor):
        raise ValueError(
            f"{_label(tensor)} has strides {tensor.stride}; the rule: strides without gaps, as a JAX array has none"
        )
    dtype = jnp.dtype(tensor.data_type.value)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(f"{_label(tensor)} needs 64-bit types; the rule: jax_enable_x64 is set")


def _fitted(array: Any, tensor: Tensor) -> Any:
    array = check.array(_label(tensor), array, rank=(len(tensor.dim),), layout=f"dims {tensor.dim}")
    check.shape(_label(tensor), array, tensor.dim, f"the tensor's dims {tensor.dim}")
    check.dtype(_label(tensor), array, (jnp.dtype(tensor.data_type.value),))
    return array


def _copied(tensor: Tensor) -> str | None:
    if storage_order(tensor) == tuple(range(len(tensor.dim))):
        return None
    return f"{_label(tensor)} is transposed: its strides {tensor.stride} are not row-major"


def _build(config: CallConfig, avals: Avals) -> BuiltGraph:
    graph = config.graph
    operands = {_name("in", at): tensor for at, tensor in enumerate(graph.inputs)}
    results = {_name("out", at): tensor for at, tensor in enumerate(graph.outputs)}
    return BuiltGraph(graph, operands, results, logical=True)


def _results(config: CallConfig, avals: Avals) -> Mapping[str, jax.ShapeDtypeStruct]:
    return {
        _name("out", at): jax.ShapeDtypeStruct(tensor.dim, jnp.dtype(tensor.data_type.value))
        for at, tensor in enumerate(config.graph.outputs)
    }


# Derivative


@lru_cache(maxsize=256)
def _differentiable(config: CallConfig, wanted: frozenset[int]) -> Differentiable:
    try:
        return Differentiable(config.graph, wanted)
    except NotImplementedError as error:
        raise _without_derivative(error) from None


@lru_cache(maxsize=256)
def _backward(config: CallConfig, wanted: frozenset[int], given: frozenset[int]) -> Backward:
    try:
        return _differentiable(config, wanted).backward(sorted(given))
    except NotImplementedError as error:
        raise _without_derivative(error) from None


def _without_derivative(error: Exception) -> NotImplementedError:
    instead = f"wrap it in jax.custom_vjp with a graph for each direction, or use implementation={REFERENCE!r}"
    return NotImplementedError(f"cudnn_jax.call: {error}; {instead}")


def _positions(moving: frozenset[str]) -> frozenset[int]:
    return frozenset(int(name.removeprefix("in")) for name in moving)


def _keeping(
    config: CallConfig, operands: Mapping[str, Any], moving: frozenset[str], notes: tuple[str, ...]
) -> tuple[list[Any], list[Any]]:
    """The graph's outputs, and what of the forward its backward may take."""
    ready = _differentiable(config, _positions(moving))
    made = _run(_with(config, ready.forward), operands)
    return [made[at] for at in ready.outputs], [made[at] for at in ready.kept]


def _reverse(
    config: CallConfig,
    operands: Mapping[str, Any],
    kept: Sequence[Any],
    moving: frozenset[str],
    cotangents: Sequence[Any],
) -> dict[str, Any]:
    given = frozenset(at for at, cotangent in enumerate(cotangents) if cotangent is not None)
    backward = _backward(config, _positions(moving), given)
    sides = {"input": list(operands.values()), "kept": kept, "cotangent": cotangents}
    gradients: dict[str, Any] = dict.fromkeys(moving)
    if backward.gradients:
        taken = [(sides[side][position], order) for side, position, order in backward.origins]
        arrays = {_name("in", at): x.transpose(order) if order else x for at, (x, order) in enumerate(taken)}
        made = _run(_with(config, backward.graph), match_manual_axes(arrays))
        gradients |= {_name("in", at): made[position] for at, position in backward.gradients.items()}
    return gradients


# Under vmap


def _unfolded(config: CallConfig, operands: Mapping[str, Any]) -> Any:
    """The graph in plain JAX, which `vmap` knows, where that is what is asked for."""
    if config.implementation != REFERENCE:
        return None
    return partial(_reference, config)


@lru_cache(maxsize=256)
def _folded(config: CallConfig, size: int, mapped: frozenset[int]) -> tuple[Folded, CallConfig]:
    made = fold(config.graph, size, mapped)
    return made, _with(config, cast(pygraph, made.graph))


def _mapped(
    config: CallConfig, operands: Mapping[str, Any], axes: Mapping[str, int | None], size: int, notes: tuple[str, ...]
) -> list[Any] | None:
    """The graph over more rows, or, where elements cannot be rows of one graph, the reference over them all."""
    if not config.by_rows:
        return None
    try:
        told, over = _folded(config, size, _positions(frozenset(name for name in axes if axes[name] is not None)))
    except NotImplementedError as error:
        if config.implementation is None:
            return jax.vmap(partial(_reference, config), in_axes=(dict(axes),))(operands)
        raise NotImplementedError(
            f"cudnn_jax.call has no vmap rule here on {config.implementation!r}: {error}; "
            f"implementation={REFERENCE!r} and None have one"
        ) from None
    arrays, copied = dict(operands), []
    for (name, x), tensor, differs in zip(operands.items(), config.graph.inputs, told.inputs, strict=True):
        if differs:
            stacked = x[None] if axes[name] is None else jnp.moveaxis(x, axes[name], 0)
            wanted = (size, told.rows, *tensor.dim[1:])
            copied += [f"vmap copies {_label(tensor)} to {list(wanted)}"] if stacked.shape != wanted else []
            arrays[name] = jnp.broadcast_to(stacked, wanted).reshape(size * told.rows, *tensor.dim[1:])
    made = CALL.bind(over, match_manual_axes(arrays), (*notes, *copied)).values()
    return [
        x.reshape(size, told.rows, *x.shape[1:]) if differs else jnp.broadcast_to(x, (size, *x.shape))
        for x, differs in zip(made, told.outputs, strict=True)
    ]


def _reference(config: CallConfig, operands: Mapping[str, Any]) -> list[jax.Array]:
    return reference(CALL, *operands.values(), names=tuple(operands), config=config)


CALL = register(
    Operation(
        name="call",
        build=_build,
        results=_results,
        lead=_name("in", 0),
        batched=False,
        unfolded=_unfolded,
        mapped=_mapped,
        reverse=_reverse,
        keeping=_keeping,
    )
)
