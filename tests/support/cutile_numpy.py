"""Runs programs of cuTile kernels on NumPy arrays: the kernels' own Python, block after block, with a stand-in for `ct`.

The stand-in has the meaning that cuTile documents for the calls it has, and nothing of its speed or rounding. What a
program passes, constants apart, is read back from the program's own steps, so grids, arguments and workspace are
checked as they ship.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MappingProxyType, SimpleNamespace
from typing import Any

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest

from cudnn_jax.engines import cutile
from cudnn_jax.engines.base import Program
from cudnn_jax.engines.cutile import Array, Parameter
from cudnn_jax.engines.kernels import CubinImage

POISON = 0xFF
"""Bytes of memory that nobody wrote: NaN in every floating type."""


@dataclass(frozen=True)
class _Compiled:
    function: FunctionType
    parameters: tuple[Parameter, ...]


@contextmanager
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[bytes, _Compiled]]:
    """Programs built inside hold a number in place of each image; yields what the numbers stand for."""
    known: dict[bytes, _Compiled] = {}

    def compile_kernel(
        function: FunctionType, parameters: Sequence[Parameter], target: Any, **hints: int
    ) -> CubinImage:
        image = str(len(known)).encode()
        known[image] = _Compiled(function, tuple(parameters))
        return CubinImage(image, function.__name__)

    with monkeypatch.context() as patch:
        patch.setattr(cutile, "compile_kernel", compile_kernel)
        yield known


def run(
    program: Program,
    known: dict[bytes, _Compiled],
    inputs: Sequence[np.ndarray],
    in_place: Mapping[int, int] = MappingProxyType({}),
) -> list[np.ndarray]:
    """The outputs of a program of cubin steps. Outputs and workspace hold NaN before.

    `in_place` is the graph's: such an output starts as that input's values, which only it holds: kernels are compiled
    for arrays that do not overlap, so they may not read one through another.
    """
    payload = msgpack.unpackb(msgpack.unpackb(program.data)["payload"])
    for given, expected in zip(inputs, payload["inputs"], strict=True):
        assert (list(given.shape), str(given.dtype)) == (expected["shape"], expected["dtype"])
    outputs = [_poisoned(each["shape"], jnp.dtype(each["dtype"])) for each in payload["outputs"]]
    inputs = list(inputs)
    for made, over in in_place.items():
        outputs[made][...] = inputs[over]
        inputs[over] = _poisoned(inputs[over].shape, inputs[over].dtype)
    workspace = _poisoned([payload["workspace"]], np.dtype(np.uint8))
    memory = [array.reshape(-1).view(np.uint8) for array in (*inputs, *outputs)]
    before = [array.copy() for array in inputs]
    for step in payload["steps"]:
        if step["kind"] == "fill":
            _fill(step, memory)
        else:
            _launch(known[step["image"]], step["grid"], iter(step["args"]), memory, workspace)
    for array, old in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(array.view(np.uint8), old.view(np.uint8), "an input was written")
    return outputs


def _fill(step: dict[str, Any], memory: list[np.ndarray]) -> None:
    kind, where = step["dest"]
    assert (kind, step["width"]) == ("operand", 1)
    memory[where][: step["bytes"]] = step["value"]


def _poisoned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    return np.full(int(np.prod(shape)) * dtype.itemsize, POISON, np.uint8).view(dtype).reshape(shape)


def _launch(
    compiled: _Compiled, grid: Sequence[int], args: Iterator[Any], memory: list[np.ndarray], workspace: np.ndarray
) -> None:
    values = [
        _array(each, args, memory, workspace) if isinstance(each, Array) else each for each in compiled.parameters
    ]
    assert not list(args), "the step has more arguments than the kernel has parameters"
    modules = _modules(compiled.function)
    real = modules[0].ct
    try:
        for block in np.ndindex(*grid):
            for module in modules:
                module.ct = _stand_in(block, grid)
            with np.errstate(over="ignore", invalid="ignore"):
                compiled.function(*values)
    finally:
        for module in modules:
            module.ct = real


def _modules(function: FunctionType) -> list[Any]:
    """The module of a kernel and those whose functions it takes from there."""
    own = sys.modules[function.__module__]
    shared = {each.__module__ for each in vars(own).values() if isinstance(each, FunctionType)}
    return [own, *(sys.modules[name] for name in sorted(shared - {own.__name__}))]


def _array(expected: Array, args: Iterator[Any], memory: list[np.ndarray], workspace: np.ndarray) -> np.ndarray:
    """The next array of a launch: pointer, dimensions, strides."""
    kind, where = next(args)
    assert kind in ("operand", "workspace")
    numbers = []
    for _ in range(2 * len(expected.shape)):
        immediate, (dtype, number) = next(args)
        assert (immediate, dtype) == ("immediate", "int32")
        numbers.append(number)
    shape, strides = numbers[: len(expected.shape)], numbers[len(expected.shape) :]
    dtype = jnp.dtype(expected.dtype.value)
    flat = (memory[where] if kind == "operand" else workspace[where:]).view(np.uint8)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    made = flat[:nbytes].view(dtype).reshape(shape).view(_Memory)
    assert list(made.strides) == [step * dtype.itemsize for step in strides]
    assert kind == "workspace" or nbytes == flat.size
    return made


TFLOAT32 = object()
"""Rounded to its 10 bits behind the point, and held as float32: NumPy has no such type."""


def _stand_in(block: Sequence[int], grid: Sequence[int]) -> SimpleNamespace:
    same = {name: getattr(np, name) for name in ("abs", "exp", "log", "minimum", "maximum", "where")}
    return SimpleNamespace(
        **same,
        exp2=lambda tile, flush_to_zero=False: np.exp2(tile),
        PaddingMode=SimpleNamespace(ZERO="zero", UNDETERMINED="undetermined"),
        bfloat16=jnp.dtype(jnp.bfloat16),
        float16=np.dtype(np.float16),
        float32=np.dtype(np.float32),
        tfloat32=TFLOAT32,
        int32=np.dtype(np.int32),
        int64=np.dtype(np.int64),
        bid=lambda axis: np.int32(block[axis]),
        num_blocks=lambda axis: grid[axis],
        cdiv=lambda x, y: -(-x // y),
        static_iter=iter,
        arange=lambda size, dtype: np.arange(size, dtype=dtype),
        zeros=lambda shape, dtype: np.zeros(shape, np.float32 if dtype is TFLOAT32 else dtype),
        full=lambda shape, value, dtype: np.full(shape, value, dtype),
        astype=_astype,
        reshape=lambda tile, shape: tile.reshape(shape),
        transpose=np.transpose,
        sum=lambda tile, axis=None, keepdims=False: tile.sum(axis, keepdims=keepdims, dtype=tile.dtype),
        min=lambda tile, axis=None, keepdims=False: tile.min(axis, keepdims=keepdims),
        cumsum=_cumsum,
        rsqrt=lambda tile, flush_to_zero=False: (1 / np.sqrt(tile)).astype(tile.dtype),
        mma=_mma,
        load=_load,
        store=_store,
        gather=_gather,
        scatter=_scatter,
    )


def _astype(tile: np.ndarray, dtype: Any) -> np.ndarray:
    if dtype is not TFLOAT32:
        return tile.astype(dtype)
    bits = tile.astype(np.float32).view(np.uint32)
    kept = (bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.asarray(kept.view(np.float32))


def _mma(x: np.ndarray, y: np.ndarray, acc: np.ndarray) -> np.ndarray:
    assert x.dtype == y.dtype, "cuTile converts no operand of a product"
    return x.astype(acc.dtype) @ y.astype(acc.dtype) + acc


def _inside(array: np.ndarray, indices: Any, mask: Any) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The broadcast indices, and which of them lie in the array and are asked for."""
    *broadcast, asked = np.broadcast_arrays(*indices, mask)
    extents = zip(broadcast, array.shape, strict=True)
    return tuple(broadcast), asked & np.logical_and.reduce([(0 <= at) & (at < size) for at, size in extents])


def _gather(array: np.ndarray, indices: Any, *, mask: Any = True) -> np.ndarray:
    at, inside = _inside(array, indices, mask)
    values = np.asarray(array)[tuple(np.where(inside, each, 0) for each in at)]
    return np.where(inside, values, np.zeros((), array.dtype))[()]


def _scatter(array: np.ndarray, indices: Any, value: Any, *, mask: Any = True) -> None:
    assert value.dtype == array.dtype
    at, inside = _inside(array, indices, mask)
    array[tuple(each[inside] for each in at)] = np.broadcast_to(value, inside.shape)[inside]


def _cumsum(tile: np.ndarray, axis: int, reverse: bool = False) -> np.ndarray:
    return (
        np.flip(np.flip(tile, axis).cumsum(axis, dtype=tile.dtype), axis) if reverse else tile.cumsum(axis, tile.dtype)
    )


class _Memory(np.ndarray):
    """An array that a kernel is given."""

    def tiled_view(
        self, shape: Sequence[int], *, traversal_steps: Sequence[int], padding_mode: str = "undetermined"
    ) -> SimpleNamespace:
        """Tiles whose origins are `traversal_steps` apart."""

        def part(index: Sequence[int]) -> _Memory:
            starts = [at * step for at, step in zip(index, traversal_steps, strict=True)]
            assert all(0 <= start < extent for start, extent in zip(starts, self.shape, strict=True))
            return self[tuple(slice(start, None) for start in starts)]

        first = (0,) * len(shape)
        return SimpleNamespace(
            load=lambda index: _load(part(index), first, shape, padding_mode=padding_mode),
            store=lambda index, tile: _store(part(index), first, tile),
        )

    def slice(self, axis: int, start: int, stop: int) -> _Memory:
        assert 0 <= start < self.shape[axis] and start <= stop <= self.shape[axis], "a slice out of its array"
        assert start.dtype == np.int64, "cuTile multiplies the start by the stride in the start's own type"
        return self[(slice(None),) * axis + (slice(start, stop),)]


def _window(array: np.ndarray, index: Sequence[int], shape: Sequence[int], check_bounds: bool) -> tuple[slice, ...]:
    starts = [at * size for at, size in zip(index, shape, strict=True)]
    for start, size, extent in zip(starts, shape, array.shape, strict=True):
        assert 0 <= start < extent, "a tile that lies outside of its array is undefined"
        assert check_bounds or start + size <= extent, "nothing checks the bounds of a tile that reaches past its array"
    for size in shape:
        assert size & (size - 1) == 0, "a tile's sizes are powers of two"
    return tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))


def _load(
    array: np.ndarray,
    index: Any,
    shape: Any,
    *,
    order: Sequence[int] | None = None,
    padding_mode: str = "undetermined",
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool = True,
) -> np.ndarray:
    if order is not None:
        array = array.transpose(order)
    inside = np.asarray(array[_window(array, index, shape, check_bounds)])
    # tileiras 13.4 fails on a padding of what is not checked.
    assert check_bounds or padding_mode == "undetermined"
    assert padding_mode == "zero" or inside.shape == tuple(shape), "what lies past the array is undetermined"
    tile = np.zeros(shape, array.dtype)
    tile[tuple(slice(0, size) for size in inside.shape)] = inside
    return tile


def _store(
    array: np.ndarray, index: Any, tile: np.ndarray, *, check_bounds: bool = True, allow_tma: bool = True
) -> None:
    assert tile.dtype == array.dtype, "cuTile converts no type on a store"
    inside = array[_window(array, index, tile.shape, check_bounds)]
    inside[...] = tile[tuple(slice(0, size) for size in inside.shape)]
