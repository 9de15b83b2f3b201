"""What operations owe a process with several devices: tests that a class for CPUs and one for GPUs inherit."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cudnn_jax
from support.attention.harness import QUICK

MOVES = ("all-gather", "all-to-all", "collective-permute", "collective-broadcast")
SUM = "all-reduce"
COUNT = 2
"""Devices that are used."""
SPLITS = {"batch": P("x"), "heads": P(None, None, "x")}

Arrays = Sequence[Any]


def communication(text: str) -> set[str]:
    """What a compiled program moves between devices."""
    return {found for found in (*MOVES, SUM) if re.search(rf" {found}(-start)?\(", text)}


def _sdpa(query: Any, key: Any, value: Any) -> Any:
    return cudnn_jax.sdpa(query, key, value, is_causal=True, deterministic=True)


def _gdn(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
    return cudnn_jax.gdn(q, k, v, g, beta, use_qk_l2norm=True, use_beta_sigmoid=True, safe_gate=True)[0]


OPERATIONS: dict[str, tuple[Callable[..., Any], int]] = {"sdpa": (_sdpa, 0), "gdn": (_gdn, 2)}
"""Name -> the operation of three arrays (B, T, H, D), and how many (B, T, H) it takes behind them."""


def both(name: str) -> Callable[..., tuple[Any, ...]]:
    """Operands and the output's cotangent -> the output and the operands' gradients."""

    def run(*given: Any) -> tuple[Any, ...]:
        *operands, cotangent = given
        out, pull = jax.vjp(OPERATIONS[name][0], *operands)
        return out, *pull(cotangent)

    return run


def described(name: str, sizes: tuple[int, ...], dtype: str) -> list[jax.ShapeDtypeStruct]:
    """What `both` takes; every array has the batch first and the heads third."""
    wide, narrow = jax.ShapeDtypeStruct(sizes, dtype), jax.ShapeDtypeStruct(sizes[:3], "float32")
    return [wide, wide, wide, *[narrow] * OPERATIONS[name][1], wide]


def share(sizes: tuple[int, ...], split: str, count: int) -> tuple[int, ...]:
    """The sizes that one of `count` devices holds."""
    at = list(SPLITS).index(split) * 2
    return (*sizes[:at], sizes[at] // count, *sizes[at + 1 :])


@functools.cache
def drawn(name: str, sizes: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.asarray(rng.standard_normal(x.shape), x.dtype) for x in described(name, sizes, dtype)]


@functools.cache
def expected(name: str, sizes: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    """By the reference engine in float32, on a CPU."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        wide = [jnp.asarray(x, jnp.float32) for x in drawn(name, sizes, dtype)]
        return [np.asarray(x) for x in jax.jit(both(name)).lower(*wide).compile(QUICK)(*wide)]


def close(got: Arrays, want: Arrays, dtype: str) -> None:
    """Norms of differences; NaN, which poisoned outputs hold, is never close."""
    limit = {"float32": 1e-5, "bfloat16": 3e-2}[dtype]
    for at, (x, y) in enumerate(zip(got, want, strict=True)):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= limit * np.linalg.norm(y), f"result {at}"


def same_bits(got: Arrays, want: Arrays) -> None:
    for at, (x, y) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8), f"result {at}")


class OverDevices:
    """A class for a platform says what is below, and has a fixture `name` of the operations it tests."""

    sizes: ClassVar[tuple[int, int, int, int]]
    """(B, T, H, D); B and H are multiples of COUNT."""
    dtype: ClassVar[str]
    programs: ClassVar[int]
    """How many custom calls forward and backward compile to."""
    options: ClassVar[dict[str, Any]] = {}
    ways: ClassVar[tuple[str, ...]] = ("shard_map", "auto")
    """Who splits: the caller, or XLA."""

    def compiled(self, fn: Callable[..., Any], given: Arrays) -> tuple[Callable[..., Any], str]:
        made = jax.jit(fn).lower(*given).compile(self.options)
        text = made.as_text()
        assert text.count('custom_call_target="cudnn_jax.program"') == self.programs
        return made, text

    def alone(self, name: str, problems: Sequence[Arrays], device: Any) -> list[list[np.ndarray]]:
        """The results of problems of one size on one device, by a function that is compiled for it now."""
        placed = [jax.device_put(list(given), device) for given in problems]
        run, _ = self.compiled(both(name), placed[0])
        return [[np.asarray(x) for x in run(*given)] for given in placed]

    def test_each_device_alone(self, name: str) -> None:
        """The last one first."""
        given = drawn(name, self.sizes, self.dtype)
        got = [self.alone(name, [given], device)[0] for device in jax.local_devices()[:COUNT][::-1]]
        close(got[0], expected(name, self.sizes, self.dtype), self.dtype)
        for each in got[1:]:
            same_bits(each, got[0])

    @pytest.mark.parametrize("split", SPLITS)
    def test_split(self, name: str, split: str) -> None:
        """Equal to the whole on one device, and to the bit where one device does the same work."""
        devices, spec = jax.local_devices()[:COUNT], SPLITS[split]
        mesh = Mesh(np.array(devices), ("x",), axis_types=(AxisType.Auto,))
        whole = drawn(name, self.sizes, self.dtype)
        placed = jax.device_put(whole, NamedSharding(mesh, spec))
        here = self.alone(name, self._parts(placed), devices[0])
        for way in self.ways:
            fn = both(name)
            if way == "shard_map":
                fn = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)
            run, text = self.compiled(fn, placed)
            assert communication(text) == set(), way
            got = run(*placed)
            close(got, expected(name, self.sizes, self.dtype), self.dtype)
            for device, want, part in zip(devices, here, self._parts(got), strict=True):
                assert all(x.devices() == {device} for x in part)
                same_bits(part, want)

    def _parts(self, arrays: Arrays) -> list[list[jax.Array]]:
        """What each device holds."""
        shards = [sorted(x.addressable_shards, key=lambda each: each.device.id) for x in arrays]
        return [[each[at].data for each in shards] for at in range(COUNT)]
