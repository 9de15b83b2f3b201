"""How an operation splits over a mesh: over its batch and its heads, each device on its own.

Mesh axes have three types. Inside `shard_map` they are Manual, and arrays are local already. Explicit ones are part of
the operands' types, and become Manual for the operation. What Auto ones split is known to XLA alone and when it
compiles: the operation is then a call that XLA asks how it splits, and that is planned for what one device holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

BATCH, HEADS = "batch", "heads"
"""What an operation splits over. An array with fewer heads than others has each read by as many of them, in order."""

Axes = Mapping[str, tuple[str | None, ...]]
"""Array -> what each of its axes counts: BATCH, HEADS, or None for an axis that is never split."""
Placed = Mapping[str, Mapping[str, int]]
"""BATCH or HEADS -> the mesh axes that split it with their sizes, major first."""
_Spec = tuple[tuple[str, ...], ...]
"""An array's axis -> the mesh axes that split it, major first."""


@dataclass(frozen=True)
class Split:
    """An operation's arrays as far as splitting them goes.

    Attributes:
      shapes: of operands, then of results, in order.
      operands: the names of the first.
      axes: may tell of more arrays, and of more axes, than there are.
      gradients: result -> operand it is the gradient of.
    """

    shapes: Mapping[str, tuple[int, ...]]
    operands: Sequence[str]
    axes: Axes
    gradients: Mapping[str, str]

    @property
    def results(self) -> list[str]:
        return [name for name in self.shapes if name not in self.operands]

    def rule(self) -> SdyShardingRule:
        """The rule for Shardy: what splits one array splits the others alike."""
        sizes: dict[str, int] = {}
        mapped = {name: ArrayMapping(*self._factors(name, sizes)) for name in self.shapes}
        whole = {each for mapping in mapped.values() for each in mapping if isinstance(each, str)}
        return SdyShardingRule(
            tuple(mapped[name] for name in self.operands),
            tuple(mapped[name] for name in self.results),
            **{factor: size for factor, size in sizes.items() if factor not in whole},
        )

    def place(self, seen: Mapping[str, _Spec], sizes: Mapping[str, int], summing: bool = True) -> Placed:
        """How to split: as the first array that is split already, as far as all arrays can be."""
        placed: dict[str, Mapping[str, int]] = {BATCH: {}, HEADS: {}}
        for over, other in ((BATCH, HEADS), (HEADS, BATCH)):
            found = [seen[name][at] for name in seen for at in self._along(name, over)]
            free = next((axes for axes in found if axes and not set(axes) & set(placed[other])), ())
            for count in range(len(free), -1, -1):
                placed[over] = {axis: sizes[axis] for axis in free[:count]}
                if self._fits(placed, summing):
                    break
        return placed

    def specs(self, placed: Placed) -> dict[str, PartitionSpec]:
        return {name: PartitionSpec(*self._spec(name, placed)) for name in self.shapes}

    def whole(self, results: Sequence[jax.Array], placed: Placed) -> list[jax.Array]:
        """The results of one device, gradients added up where each device has a part."""
        made = []
        for name, x in zip(self.results, results, strict=True):
            axes = self._summed(name, placed)
            made.append(jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype) if axes else x)
        return made

    def _summed(self, name: str, placed: Placed) -> tuple[str, ...]:
        """The mesh axes over which each device has a part of a gradient: those that do not split its operand."""
        if name not in self.gradients:
            return ()
        spec = self._spec(self.gradients[name], placed)
        return tuple(axis for axes in placed.values() for axis in axes if not any(axis in each for each in spec))

    def _spec(self, name: str, placed: Placed) -> _Spec:
        counted = zip(self.shapes[name], self.axes[name], strict=False)
        return tuple(_splitting(length, placed[over]) or () if over else () for length, over in counted)

    def _fits(self, placed: Placed, summing: bool) -> bool:
        for name, shape in self.shapes.items():
            for over, axes in placed.items():
                if any(_splitting(shape[at], axes) is None for at in self._along(name, over)):
                    return False
        return summing or not any(self._summed(name, placed) for name in self.results)

    def _along(self, name: str, over: str) -> list[int]:
        return [at for at, counted in enumerate(self.axes[name]) if counted == over]

    def _factors(self, name: str, sizes: dict[str, int]) -> list[Any]:
        factors: list[Any] = []
        for at, length in enumerate(self.shapes[name]):
            over = self.axes[name][at]
            common = self._common(over) if over else 1
            if over is None or common == 1 or length == 1:
                factors.append(f"{name}_{at}")
            elif common == length:
                factors.append(over)
            else:
                rest = f"{over}_of_{length}"
                sizes |= {over: common, rest: length // common}
                factors.append(CompoundFactor(over, rest))
        return factors

    def _common(self, over: str) -> int:
        lengths = [self.shapes[name][at] for name in self.shapes for at in self._along(name, over)]
        return max(1, math.gcd(*(length for length in lengths if length != 1)))


def _splitting(length: int, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Which of the mesh axes split an array's axis: all, or as many as leave 1, which the parts then share."""
    if length % math.prod(axes.values()) == 0:
        return tuple(axes)
    names, sizes = list(axes), list(axes.values())
    return next((tuple(names[:at]) for at in range(len(names)) if math.prod(sizes[:at]) == length), None)


# Explicit axes


def over_explicit_axes(
    split_of: Callable[[], Split | None], run: Callable[..., Sequence[jax.Array]], operands: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """`run` on what each device holds, where the operands' types say that Explicit axes split them.

    Only then is it asked how the operation splits.
    """
    types = [jax.typeof(x) for x in operands]
    mesh = types[0].sharding.mesh
    explicit = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit]
    split = split_of() if explicit else None
    if split is None:
        return run(*operands)
    seen = dict(zip(split.operands, (_explicit_part(each, explicit) for each in types), strict=True))
    if not any(axes for spec in seen.values() for axes in spec):
        return run(*operands)
    placed = split.place(seen, mesh.shape)
    specs = split.specs(placed)

    def local(*operands: jax.Array) -> list[jax.Array]:
        return split.whole(run(*vary_alike(operands)), placed)

    made = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(specs[name] for name in split.operands),
        out_specs=[specs[name] for name in split.results],
        axis_names=set(explicit),
    )(*(jax.reshard(x, NamedSharding(mesh, specs[name])) for name, x in zip(split.operands, operands, strict=True)))
    given = dict(zip(split.operands, types, strict=True))
    return [
        jax.reshard(x, given[split.gradients[name]].sharding) if name in split.gradients else x
        for name, x in zip(split.results, made, strict=True)
    ]


def vary_alike(operands: Sequence[Any]) -> list[Any]:
    """Makes every operand vary over the same Manual axes: gradients of replicated ones are then summed."""
    axes = [frozenset(jax.typeof(x).manual_axis_type.varying) for x in operands]
    union = frozenset().union(*axes)
    return [
        jax.lax.pcast(x, tuple(union - own), to="varying") if union - own else x
        for x, own in zip(operands, axes, strict=True)
    ]


def _explicit_part(aval: Any, explicit: Sequence[str]) -> _Spec:
    entries = (each if isinstance(each, tuple) else (each,) for each in aval.sharding.spec)
    return tuple(tuple(axis for axis in axes if axis in explicit) for axes in entries)


# Auto axes


def partitions(ctx: Any) -> int:
    """Over how many devices XLA is to partition what is lowered here. 1 inside `shard_map`, which has done it."""
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.ShardingContext):
        return int(context.num_devices)
    if isinstance(context, mlir.SPMDAxisContext):
        return math.prod(size for name, size in context.mesh.shape.items() if name not in context.manual_axes)
    return 1


def lower_partitioned(
    ctx: Any,
    split: Split,
    whole: Callable[..., Sequence[jax.Array]],
    local: Callable[[Mapping[str, tuple[int, ...]]], Callable[..., Sequence[jax.Array]]],
    args: Sequence[Any],
    label: str,
) -> Sequence[Any]:
    """Emits a call that XLA partitions.

    Args:
      whole: the operation.
      local: operands' shapes on one device -> the operation there.
      label: what `whole` is, with all that its operands do not say: a part of the compilation cache's key, which the
        call's own text would not be.
    """
    count = partitions(ctx)
    # Devices of a group inside of a partly manual `shard_map` count from 0 in each, and a sum would mix the groups up.
    summing = isinstance(ctx.module_context.axis_context, mlir.ShardingContext)

    def partition(_: Any, operands: Any, results: Any) -> Any:
        shardings = [each.sharding for each in (*operands, *results)]
        mesh, seen = _read(dict(zip(split.shapes, shardings, strict=True)), split, count)
        placed = split.place(seen, mesh.shape, summing)
        made = {name: NamedSharding(mesh, spec) for name, spec in split.specs(placed).items()}
        run = local({name: made[name].shard_shape(split.shapes[name]) for name in split.operands})

        def body(*arrays: jax.Array) -> list[jax.Array]:
            return split.whole(run(*arrays), placed)

        return mesh, body, [made[name] for name in split.results], tuple(made[name] for name in split.operands)

    call = custom_partitioning(whole)
    call.def_partition(partition, sharding_rule=split.rule(), decode_shardings=False)
    # The devices are not looked at, only counted.
    over_all = mlir.ShardingContext(count, tuple(jax.local_devices()[:1] * count))
    module = ctx.module_context.replace(axis_context=over_all)
    results: Sequence[Any] = mlir.lower_fun(call, multiple_results=True)(ctx.replace(module_context=module), *args)
    text = mlir.ir.StringAttr.get(label)
    results[0].owner.attributes["mhlo.frontend_attributes"] = mlir.ir.DictAttr.get({"cudnn_jax": text})
    return results


def _read(shardings: Mapping[str, Any], split: Split, count: int) -> tuple[AbstractMesh, dict[str, _Spec]]:
    """The mesh in whose axes most of the shardings can be said, and what they say there."""
    read = []
    for mesh in _meshes(count):
        specs = {name: _spec(sharding, len(split.shapes[name]), mesh) for name, sharding in shardings.items()}
        read.append((mesh, {name: spec for name, spec in specs.items() if spec is not None}))
    return max(read, key=lambda each: len(each[1]))


@lru_cache(maxsize=64)
def _meshes(count: int) -> list[AbstractMesh]:
    """Meshes of that many devices with axes of prime length: one of them is a refinement of the caller's."""
    return [AbstractMesh(sizes, tuple(f"d{at}" for at in range(len(sizes)))) for sizes in _factorings(count)]


def _factorings(count: int) -> list[tuple[int, ...]]:
    if count == 1:
        return [()]
    primes = [p for p in range(2, count + 1) if count % p == 0 and all(p % q for q in range(2, p))]
    return [(p, *rest) for p in primes for rest in _factorings(count // p)]


def _spec(sharding: Any, rank: int, mesh: AbstractMesh) -> _Spec | None:
    """What a sharding says in terms of the mesh's axes, or None where these cannot say it."""
    tiles = sharding._to_xla_hlo_sharding(rank)
    if tiles.is_replicated():
        return ((),) * rank
    devices = np.asarray(tiles.tile_assignment_devices())
    if devices.size != mesh.size:
        return None
    tile = np.empty_like(devices)
    tile[devices] = np.arange(devices.size)
    spec = []
    for of_axis in np.unravel_index(tile, tiles.tile_assignment_dimensions())[:rank]:
        grid = of_axis.reshape(mesh.axis_sizes)
        steps = [int(grid[tuple(np.eye(grid.ndim, dtype=int)[at])]) for at in range(grid.ndim)]
        if not np.array_equal(grid, sum(step * at for step, at in zip(steps, np.indices(grid.shape), strict=True))):
            return None
        split = sorted((at for at, step in enumerate(steps) if step), key=lambda at: -steps[at])
        spec.append(tuple(mesh.axis_names[at] for at in split))
    return tuple(spec)
