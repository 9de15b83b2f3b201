"""The table of primitives: what an operation owes, and the JAX rules made from it.

An operation is one entry: how its graph is built, which results it has, and which axis is its batch. From it come
abstract evaluation, lowering for each platform and batching. Its derivative is a second entry, joined by `custom_vjp`
in the operation's file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from cudnn_jax import _runtime, _target
from cudnn_jax.engines import planning
from cudnn_jax.engines.base import Artifact, Inline, Program
from cudnn_jax.engines.program import storage_order, storage_shape
from cudnn_jax.engines.target import CPU
from cudnn_jax.graph import Tensor
from cudnn_jax.ops import _derivative, _sharding

Avals = Mapping[str, Any]


@dataclass(frozen=True)
class BuiltGraph:
    """A graph and where the operation's operands and results sit in it.

    The operation's arrays have the shape of a tensor's memory, up to axes of length 1 and splits of an axis; with
    `logical` they have its dims, and lowering transposes where memory differs. A result may be the first elements of
    its tensor.

    Attributes:
      constants: tensors that no operand fills, with what does.
    """

    graph: planning.pygraph
    operands: Mapping[str, Tensor]
    results: Mapping[str, Tensor]
    logical: bool = False
    constants: Sequence[tuple[Tensor, np.ndarray]] = ()

    def to_memory(self, array: jax.Array, tensor: Tensor) -> jax.Array:
        return _from_logical(array, tensor) if self.logical else array.reshape(storage_shape(tensor))

    def from_memory(self, array: jax.Array, tensor: Tensor, shape: tuple[int, ...]) -> jax.Array:
        if self.logical:
            return _to_logical(array, tensor)
        return array.reshape(-1)[: math.prod(shape)].reshape(shape)


@dataclass(frozen=True)
class Operation:
    """One entry of the primitive table.

    Attributes:
      name: the primitive's name behind "cudnn_jax.".
      build: (config, operand avals) -> the graph.
      results: (config, operand avals) -> result shapes by name, in result order.
      lead: the operand whose axis 0 is the batch; every operand's and result's batch is axis 0.
      batched: whether `vmap` may fold the mapped axis into the batch.
      derivative: what it has no rule for, for the error of a derivative that reaches the primitive.
      broadcast: operands whose batch axis may stay 1.
      gradients: result -> operand it is the gradient of, and summed over whichever axes that is broadcast along.
      axes: (config, operand avals) -> what the axes of operands and results count, by name, for splitting the operation
        over a mesh; more names may be told. None: it is never split.
      sample: (config, operand avals, arrays) -> arrays that stand for a caller's, to be timed with. It is given random
        floats and booleans, and in their place the caller's own where these are known, which it cannot replace. It
        returns the integers that are not known, and what must not be random. None where random numbers serve.
      unfolded: (config, operands) -> a function of the operands to map in the operation's place, to the list of its
        results, or None where it is not what is mapped.
      stacked: (config, operands) -> a function of the operands with the mapped axis in front and of notes, to the
        results by name with it in front, or None where folding is right.
      mapped: (config, operands, the mapped axis of each or None, size, notes) -> the results with the mapped axis in
        front, or None where the other rules hold.
      reverse: what transposes the operation's derivative, for `_derivative`.
      keeping: what runs the forward for `reverse`, where that needs more than the operands.
      is_reverse: whether the operation is what another one's `reverse` calls.
    """

    name: str
    build: Callable[[Any, Avals], BuiltGraph]
    results: Callable[[Any, Avals], Mapping[str, jax.ShapeDtypeStruct]]
    lead: str
    batched: bool = True
    derivative: str = "forward-mode or second derivative: use reverse mode (jax.grad) once"
    broadcast: frozenset[str] = frozenset()
    gradients: Mapping[str, str] = field(default_factory=dict)
    axes: Callable[[Any, Avals], _sharding.Axes] | None = None
    sample: Callable[[Any, Avals, Mapping[str, jax.Array]], Mapping[str, jax.Array]] | None = None
    unfolded: Callable[[Any, Mapping[str, Any]], Callable[..., list[Any]] | None] | None = None
    stacked: Callable[[Any, Mapping[str, Any]], Callable[..., Mapping[str, Any]] | None] | None = None
    mapped: Callable[..., list[Any] | None] | None = None
    reverse: _derivative.Reverse | None = None
    keeping: _derivative.Keeping | None = None
    is_reverse: bool = False

    def bind(self, config: Any, operands: Mapping[str, Any], notes: tuple[str, ...] = ()) -> dict[str, jax.Array]:
        """Runs the operation on `operands` (absent ones left out); `notes` are said by `explain`."""
        run = partial(PRIMITIVES[self.name].bind, names=tuple(operands), config=config, notes=notes)
        avals = {name: jax.typeof(value) for name, value in operands.items()}
        out = _sharding.over_explicit_axes(partial(self.split, config, avals), run, tuple(operands.values()))
        return dict(zip(self.results(config, avals), out, strict=True))

    def split(self, config: Any, avals: Avals) -> _sharding.Split | None:
        """How the operation splits over a mesh, if it does."""
        if self.axes is None:
            return None
        results = self.results(config, avals)
        shapes = {name: tuple(aval.shape) for name, aval in [*avals.items(), *results.items()]}
        return _sharding.Split(shapes, tuple(avals), self.axes(config, avals), self.gradients)


OPERATIONS: dict[str, Operation] = {}
PRIMITIVES: dict[str, core.Primitive] = {}


def register(operation: Operation) -> Operation:
    """Makes the operation's primitive and all the rules it owes."""
    primitive = core.Primitive(f"cudnn_jax.{operation.name}")
    primitive.multiple_results = True
    primitive.def_impl(partial(_run_eagerly, operation.name))
    primitive.def_abstract_eval(partial(_abstract_eval, operation))
    mlir.register_lowering(primitive, partial(_lower, operation))
    mlir.register_lowering(primitive, partial(_lower, operation), platform="cuda")
    batching.primitive_batchers[primitive] = partial(_batch, operation)
    ad.primitive_jvps[primitive] = partial(_refuse_jvp, operation)
    if operation.reverse is not None:
        _derivative.define_forward(
            operation.name,
            primitive,
            partial(_abstract_eval, operation),
            partial(reference, operation),
            operation.reverse,
            operation.keeping,
        )
    elif operation.is_reverse:
        _derivative.define_backward(operation.name, primitive, partial(reference, operation))
    OPERATIONS[operation.name] = operation
    PRIMITIVES[operation.name] = primitive
    return operation


class Partitioned:
    """How XLA partitioned operations: by `call_key`, the operands' shapes on one device of each call of that kind."""

    def __init__(self) -> None:
        self._shapes: dict[Hashable, list[tuple[tuple[int, ...], ...]]] = {}

    def of(self, key: Hashable) -> list[tuple[tuple[int, ...], ...]]:
        return self._shapes.setdefault(key, [])


partitioned = jax.make_user_context(None)
"""A `Partitioned` for what is lowered to fill; part of JAX's own cache keys, so that nothing comes from a cache.

It is not looked at while XLA compiles, which may be in another thread.
"""


def call_key(operation: Operation, avals: Sequence[Any], *, names: Sequence[str], config: Any, notes: Any) -> Hashable:
    """Calls with equal keys are the same operation on operands of the same shapes."""
    return operation.name, tuple(names), tuple((aval.shape, aval.dtype) for aval in avals), config, notes


_PLANNED = core.Primitive("cudnn_jax.planned")
"""An operation together with the artifact that runs it, whatever planning would choose."""


def with_artifact(
    operation: Operation, config: Any, names: Sequence[str], artifact: Artifact
) -> Callable[..., Sequence[jax.Array]]:
    """The operation as a function of its operands, in the order of `names`, that runs `artifact`."""
    return partial(_PLANNED.bind, operation=operation.name, names=tuple(names), config=config, artifact=artifact)


def match_manual_axes(operands: Mapping[str, Any]) -> dict[str, Any]:
    """Makes every operand vary over the same axes inside `shard_map`: gradients of replicated ones are then summed."""
    return dict(zip(operands, _sharding.vary_alike(tuple(operands.values())), strict=True))


def _run_eagerly(name: str, *args: Any, **params: Any) -> Sequence[jax.Array]:
    with jax.disable_jit(False):
        return _jitted(name, tuple(params.items()))(*args)


@lru_cache(maxsize=1024)
def _jitted(name: str, params: tuple[tuple[str, Any], ...]) -> Callable[..., Sequence[jax.Array]]:
    bound = partial(PRIMITIVES[name].bind, **dict(params))
    bound.__name__ = name  # type: ignore[attr-defined]
    return jax.jit(bound)


def _abstract_eval(operation: Operation, *avals: Any, names: Sequence[str], config: Any, notes: Any) -> list[Any]:
    operands = dict(zip(names, avals, strict=True))
    like = operands[operation.lead]
    return [_result_aval(like, out.shape, out.dtype) for out in operation.results(config, operands).values()]


def _result_aval(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A result that varies over the manual axes of `like`."""
    sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*(None,) * len(shape)))
    return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _lower(operation: Operation, ctx: Any, *args: Any, names: Sequence[str], config: Any, notes: Any) -> Any:
    if operation.axes is not None and _sharding.partitions(ctx) > 1:
        return _lower_partitioned(operation, ctx, args, names, config, notes)
    operands = dict(zip(names, ctx.avals_in, strict=True))
    built = operation.build(config, operands)
    planned = planning.plan(built.graph, _target.of_lowering(ctx), config.implementation)
    return _emit_artifact(ctx, planned.artifact, built, names, operation.results(config, operands), args)


def _lower_partitioned(
    operation: Operation, ctx: Any, args: Sequence[Any], names: Sequence[str], config: Any, notes: Any
) -> Sequence[Any]:
    """What XLA partitions, each device's share planned for its own shapes."""
    if ctx.module_context.lowering_parameters.for_export:
        raise NotImplementedError(
            f"cudnn_jax.{operation.name} cannot be exported where XLA is to partition it over "
            f"{_sharding.partitions(ctx)} devices: split batch and heads with jax.shard_map in the exported function"
        )
    target = _target.of_lowering(ctx)
    recorder = partitioned.value or Partitioned()
    seen = recorder.of(call_key(operation, ctx.avals_in, names=names, config=config, notes=notes))
    dtypes = {name: aval.dtype for name, aval in zip(names, ctx.avals_in, strict=True)}

    def local(shapes: Mapping[str, tuple[int, ...]]) -> Callable[..., Sequence[jax.Array]]:
        avals = {name: jax.ShapeDtypeStruct(shapes[name], dtypes[name]) for name in names}
        seen.append(tuple(shapes[name] for name in names))
        planned = planning.plan(operation.build(config, avals).graph, target, config.implementation)
        return with_artifact(operation, config, names, planned.artifact)

    whole = partial(PRIMITIVES[operation.name].bind, names=names, config=config, notes=notes)
    split = operation.split(config, dict(zip(names, ctx.avals_in, strict=True)))
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        plain = ctx.replace(avals_in=[_plain(aval) for aval in ctx.avals_in])
        label = f"{operation.name} {config} on {target.describe()}"
        return _sharding.lower_partitioned(plain, split, whole, local, args, label)


def _lower_planned(
    ctx: Any, *args: Any, operation: str, names: Sequence[str], config: Any, artifact: Artifact
) -> Sequence[Any]:
    operands = dict(zip(names, ctx.avals_in, strict=True))
    entry = OPERATIONS[operation]
    return _emit_artifact(ctx, artifact, entry.build(config, operands), names, entry.results(config, operands), args)


def _emit_artifact(
    ctx: Any,
    artifact: Artifact,
    built: BuiltGraph,
    names: Sequence[str],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    args: Sequence[Any],
) -> Sequence[Any]:
    # What happens inside is local to the device: a mesh means nothing to it.
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        local = ctx.replace(avals_in=[_plain(aval) for aval in ctx.avals_in])
        if isinstance(artifact, Inline):
            return _emit(local, _inline(artifact, built, names, shapes), args)
        return _emit_call(local, artifact, built, names, shapes, args)


_NO_MESH = AbstractMesh((), ())


def _plain(aval: Any) -> Any:
    return jax.core.ShapedArray(aval.shape, aval.dtype)


def _inline(
    artifact: Inline, built: BuiltGraph, names: Sequence[str], shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> Callable[..., list[jax.Array]]:
    """The artifact's function between the operation's arrays and the graph's logical dims."""

    def run(*arrays: jax.Array) -> list[jax.Array]:
        given = _in_graph_order(built, names, arrays)
        logical = [_to_logical(array, tensor) for array, tensor in zip(given, built.graph.inputs, strict=True)]
        made = dict(zip(map(id, built.graph.outputs), artifact.fn(*logical), strict=True))
        return [
            built.from_memory(_from_logical(made[id(tensor)], tensor), tensor, shapes[name].shape)
            for name, tensor in built.results.items()
        ]

    return run


def reference(operation: Operation, *arrays: jax.Array, names: Sequence[str], config: Any) -> list[jax.Array]:
    """The operation in plain JAX, whatever the platform: what is traced has derivatives of its own."""
    avals = {name: jax.typeof(array) for name, array in zip(names, arrays, strict=True)}
    built = operation.build(config, avals)
    artifact = planning.plan(built.graph, CPU, _derivative.REFERENCE).artifact
    assert isinstance(artifact, Inline)
    return _inline(artifact, built, names, operation.results(config, avals))(*arrays)


def _emit(ctx: Any, fn: Callable[..., list[jax.Array]], args: Sequence[Any]) -> Sequence[Any]:
    made: Sequence[Any] = mlir.lower_fun(fn, multiple_results=True)(ctx, *args)
    return made


def _emit_call(
    ctx: Any,
    artifact: Program,
    built: BuiltGraph,
    names: Sequence[str],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    args: Sequence[Any],
) -> Sequence[Any]:
    """One custom call that carries the program; its workspace is one more result, dropped here.

    Where the operation's arrays are the call's own, as is common, nothing stands around it and nothing is traced.
    """
    _runtime.register()
    tensors = artifact.operands if artifact.prepare else built.graph.inputs
    taken = [_memory_aval(tensor) for tensor in tensors]
    made = [_memory_aval(tensor) for tensor in built.graph.outputs]
    scratch = [jax.core.ShapedArray((artifact.workspace,), jnp.uint8)] if artifact.workspace else []

    def before(*arrays: jax.Array) -> list[jax.Array]:
        given = _in_graph_order(built, names, arrays)
        return given if artifact.prepare is None else _prepared(artifact, built, given)

    def after(*arrays: jax.Array) -> list[jax.Array]:
        by_tensor = dict(zip(map(id, built.graph.outputs), arrays, strict=True))
        return [
            built.from_memory(by_tensor[id(tensor)], tensor, shapes[name].shape)
            for name, tensor in built.results.items()
        ]

    at = {id(built.operands[name]): position for position, name in enumerate(names)}
    order = [at[id(tensor)] for tensor in built.graph.inputs if id(tensor) in at]
    plain = artifact.prepare is None and not built.logical and not built.constants
    if plain and [ctx.avals_in[i].shape for i in order] == _shapes(taken):
        operands = [args[i] for i in order]
    else:
        operands = list(_emit(ctx.replace(avals_out=taken), before, args))

    call = ctx.replace(avals_in=taken, avals_out=[*made, *scratch])
    in_place = {over: out for out, over in built.graph.in_place.items()}
    rule = jax.ffi.ffi_lowering(_runtime.TARGET, operand_output_aliases=in_place or None)
    results = list(rule(call, *operands, program=np.frombuffer(artifact.data, np.uint8)))[: len(made)]

    at = {id(tensor): position for position, tensor in enumerate(built.graph.outputs)}
    order = [at[id(tensor)] for tensor in built.results.values()]
    if not built.logical and [made[i].shape for i in order] == _shapes(ctx.avals_out):
        return [results[i] for i in order]
    return _emit(ctx.replace(avals_in=made), after, results)


def _memory_aval(tensor: Tensor) -> Any:
    return jax.core.ShapedArray(storage_shape(tensor), jnp.dtype(tensor.data_type.value))


def _shapes(avals: Sequence[Any]) -> list[tuple[int, ...]]:
    return [aval.shape for aval in avals]


def _in_graph_order(built: BuiltGraph, names: Sequence[str], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The operands in the graph's order, in the shapes of their memory."""
    by_tensor = {id(built.operands[name]): array for name, array in zip(names, arrays, strict=True)}
    by_tensor |= {id(tensor): jnp.asarray(value) for tensor, value in built.constants}
    return [built.to_memory(by_tensor[id(tensor)], tensor) for tensor in built.graph.inputs]


def _prepared(artifact: Program, built: BuiltGraph, given: Sequence[jax.Array]) -> list[jax.Array]:
    """The program's operands in the shapes of their memory. What `prepare` hands on is taken as it came."""
    assert artifact.prepare is not None
    logical = [_to_logical(array, tensor) for array, tensor in zip(given, built.graph.inputs, strict=True)]
    as_it_came = {id(view): array for view, array in zip(logical, given, strict=True)}
    made = artifact.prepare(*logical)
    return [
        as_it_came[id(array)] if id(array) in as_it_came else _from_logical(array, tensor)
        for array, tensor in zip(made, artifact.operands, strict=True)
    ]


def _to_logical(array: jax.Array, tensor: Tensor) -> jax.Array:
    return array.transpose(tuple(np.argsort(storage_order(tensor))))


def _from_logical(array: jax.Array, tensor: Tensor) -> jax.Array:
    return array.transpose(storage_order(tensor))


def _batch(
    operation: Operation,
    args: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    names: Sequence[str],
    config: Any,
    notes: tuple[str, ...],
) -> tuple[list[jax.Array], list[int]]:
    """Folds the mapped axis into the batch. An operand that lacks it is repeated only where it must be, and said."""
    operands = dict(zip(names, args, strict=True))
    if operation.unfolded is not None and (fn := operation.unfolded(config, operands)) is not None:
        made = jax.vmap(fn, in_axes=(dict(zip(names, axes, strict=True)),))(operands)
        return made, [0] * len(made)
    size = next(arg.shape[axis] for arg, axis in zip(args, axes, strict=True) if axis is not None)
    if operation.mapped is not None:
        made = operation.mapped(config, operands, dict(zip(names, axes, strict=True)), size, notes)
        if made is not None:
            return made, [0] * len(made)
    if not operation.batched:
        raise NotImplementedError(
            f"cudnn_jax.{operation.name} has no vmap rule: give it the whole batch, or use jax.lax.map or "
            f"implementation={_derivative.REFERENCE!r}"
        )
    if operation.stacked is not None and (run := operation.stacked(config, operands)) is not None:
        moved = {name: _stacked(arg, axis, size) for name, arg, axis in zip(names, args, axes, strict=True)}
        copied = [name for name, axis in zip(names, axes, strict=True) if axis is None]
        results = run(moved, (*notes, *(f"vmap copies {name} {size} times" for name in copied)))
        return list(results.values()), [0] * len(results)
    lead = names.index(operation.lead)
    batch = args[lead].shape[0] if axes[lead] is None else np.delete(args[lead].shape, axes[lead])[0]
    batch = int(batch)
    differentiated = {operand for result, operand in operation.gradients.items() if result in config.gradients}
    folded: dict[str, jax.Array] = {}
    repeated: list[str] = []
    narrow: set[str] = set()
    for name, arg, axis in zip(names, args, axes, strict=True):
        own = arg.shape[0] if axis is None else int(np.delete(arg.shape, axis)[0])
        if own == 1 and batch != 1:
            narrow.add(name)
        if axis is None and own == 1 and name in operation.broadcast and name not in differentiated:
            folded[name] = arg
            continue
        stacked = arg[None] if axis is None else jnp.moveaxis(arg, axis, 0)
        wanted = (size, batch, *stacked.shape[2:])
        if stacked.shape != wanted:
            stacked = jnp.broadcast_to(stacked, wanted)
            repeated.append(f"vmap copies {name}: its batch axis of {own} becomes {size * batch}")
        folded[name] = stacked.reshape(size * batch, *wanted[2:])
    out = operation.bind(config, folded, (*notes, *repeated))
    unfolded = []
    for name, value in out.items():
        split = value.reshape(size, batch, *value.shape[1:])
        if operation.gradients.get(name) in narrow:
            split = split.sum(axis=1, keepdims=True).astype(value.dtype)
        unfolded.append(split)
    return unfolded, [0] * len(unfolded)


def _stacked(array: jax.Array, axis: int | None, size: int) -> jax.Array:
    return jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)


_PLANNED.multiple_results = True
_PLANNED.def_abstract_eval(
    lambda *avals, operation, names, config, artifact: _abstract_eval(
        OPERATIONS[operation], *avals, names=names, config=config, notes=()
    )
)
mlir.register_lowering(_PLANNED, _lower_planned)


def _refuse_jvp(operation: Operation, *_: Any, **__: Any) -> Any:
    raise NotImplementedError(f"cudnn_jax.{operation.name} has no {operation.derivative}")
