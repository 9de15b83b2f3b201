"""The bias-GELU kernel's PTX, run on small matrices against float64; and how it cuts matrices of any size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cudnn_jax.engines import cutedsl
from cudnn_jax.engines.pointwise import samples
from cudnn_jax.engines.pointwise.bias_gelu_cutedsl import OPERANDS
from cudnn_jax.engines.pointwise.facts import analyze
from cudnn_jax.engines.pointwise.slabs import Slabs
from support import ptx

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl compiles the kernel")

TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
ERROR = {"bfloat16": (2**-7, 2**-9), "float16": (2**-10, 2**-12), "float32": (1e-6, 1e-6)}
"""Relative, and absolute where terms cancel."""
GIVEN = ("x", "bias", "residual")
erfc = np.vectorize(math.erfc, otypes=[np.float64])


def gelu(h: np.ndarray, approximation: str) -> np.ndarray:
    if approximation == "erf":
        return 0.5 * h * erfc(-h / math.sqrt(2))
    return h / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))


def wanted(arrays: dict[str, np.ndarray], approximation: str) -> dict[str, np.ndarray]:
    """In float64; pre is rounded to its type before the gelu reads it, as a graph's output is."""
    pre = arrays["x"].astype(np.float64) + arrays.get("bias", np.zeros(1)).astype(np.float64)
    if "pre" in arrays:
        pre = pre.astype(arrays["pre"].dtype).astype(np.float64)
    out = gelu(pre, approximation) + arrays.get("residual", np.zeros(1)).astype(np.float64)
    return {"pre": pre, "out": out}


CUTS = [
    # rows and cols as vectors of 8 or of 4; (threads, most slabs)
    (33, 8, 32, 2),
    (6, 104, 32, 4),
    (5, 13, 32, 2),  # a vector crosses rows, elements are left behind the last vector
    (9, 20, 64, 1),
    (7, 12, 32, 4),
    (1, 40, 32, 4),  # one slab
    (3, 2, 32, 2),  # less than a vector
    (1, 1, 32, 1),
]
CASES: list[Any] = [(dtype, *cut, {}, 0) for dtype in TYPES for cut in CUTS]
CASES += [(dtype, *cut, {}, 1) for dtype in ("bfloat16", "float16") for cut in CUTS[:3]]
CASES += [
    (dtype, 6, cols, 32, 2, options, 0)
    for dtype in TYPES
    for cols, options in (
        (16, {"approximation": "tanh"}),
        (16, {"pre": True}),
        (13, {"pre": True, "approximation": "tanh", "residual": False}),
        (13, {"bias": False}),
        (16, {"bias": False, "residual": False}),
    )
]


@pytest.mark.parametrize("dtype, rows, cols, threads, most, options, tail", CASES)
def test_the_kernel_computes_the_graph(
    dtype: str, rows: int, cols: int, threads: int, most: int, options: dict[str, Any], tail: int, tmp_path: Path
) -> None:
    graph = samples.bias_gelu(rows, cols, dtype, **options)
    graph.freeze()
    problem = analyze(graph).bias_gelu
    assert problem is not None
    kernels = cutedsl.kernels("cudnn_jax.engines.pointwise._bias_gelu_cutedsl")
    names = [name for name in OPERANDS if name in problem.dtypes]
    function = kernels.function(problem, threads, most, tail)
    pointers = [cutedsl.pointer(problem.dtypes[name]) for name in names]
    text = ptx.compiled(function, pointers, "sm_90a", tmp_path / "ptx")

    rng = np.random.default_rng([rows, cols, threads, most])
    arrays: dict[str, np.ndarray] = {}
    for name in names:
        shape = (1, cols) if name == "bias" else (rows, cols)
        values = rng.standard_normal(shape) * 2.5 if name in GIVEN else np.full(shape, np.nan)
        arrays[name] = values.astype(TYPES[dtype])
    before = {name: array.copy() for name, array in arrays.items()}
    memory = ptx.Memory()
    addresses = [memory.place(arrays[name]) for name in names]
    blocks = Slabs.of(problem, most).blocks(threads)
    ptx.run(text, addresses, range(blocks), threads, memory)

    for name, want in wanted(arrays, problem.approximation).items():
        if name in arrays:
            got = arrays[name].astype(np.float64)
            relative, absolute = ERROR[dtype]
            np.testing.assert_allclose(got, want, rtol=relative, atol=absolute, err_msg=name)
    for name in set(names) & set(GIVEN):
        np.testing.assert_array_equal(arrays[name], before[name])


def slabs(rows: int, cols: int, dtype: str, most: int) -> tuple[Slabs, int]:
    graph = samples.bias_gelu(rows, cols, dtype)
    graph.freeze()
    problem = analyze(graph).bias_gelu
    assert problem is not None
    return Slabs.of(problem, most), rows * cols


def test_every_element_has_one_thread_and_a_slab_repeats_the_columns() -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        rows, cols, most = (int(rng.integers(1, top)) for top in (40, 70, 9))
        cut, total = slabs(rows, cols, str(rng.choice(["bfloat16", "float32"])), most)
        assert 1 <= cut.count <= most
        assert cut.whole * cut.width + cut.rest == total
        assert cut.count == 1 or cut.length * cut.width % cols == 0
        places = [t + k * cut.length for k in range(cut.count) for t in range(cut.threads)]
        inside = sorted(place for place in places if place < cut.whole)
        assert inside == list(range(cut.whole))
        for t in range(min(cut.threads, 3)):
            assert (t + cut.period) * cut.width % cols == t * cut.width % cols


@pytest.mark.parametrize("rows, cols, wide", [(2**15, 2**15, False), (2**16, 2**15, True), (1, 2**31 - 1, True)])
def test_indices_are_as_wide_as_the_largest_that_a_thread_forms(rows: int, cols: int, wide: bool) -> None:
    cut, _ = slabs(rows, cols, "bfloat16", 2)
    assert cut.wide == wide
    largest = max(cut.count * cut.length * cut.width, (cut.period - 1) * cut.width + cut.width)
    assert wide or largest < 2**31


def test_a_matrix_of_more_than_2_31_elements(tmp_path: Path) -> None:
    """The last threads of both slabs, over windows of a matrix that is not there."""
    rows, cols, threads = 2**17 + 1, 32773, 256
    graph = samples.bias_gelu(rows, cols, "bfloat16", bias=False, residual=False)
    graph.freeze()
    problem = analyze(graph).bias_gelu
    assert problem is not None
    kernels = cutedsl.kernels("cudnn_jax.engines.pointwise._bias_gelu_cutedsl")
    text = ptx.compiled(
        kernels.function(problem, threads, 2, 1), [cutedsl.pointer(problem.dtype)] * 2, "sm_90a", tmp_path / "ptx"
    )
    cut = Slabs.of(problem, 2)
    # The last thread with two vectors, the one behind it, and the vector that it reads again.
    last = cut.whole - cut.length - 1
    starts = [place * cut.width for place in (last, last + cut.length)]
    rng = np.random.default_rng(0)
    memory = Windows(starts, 3 * cut.width, rng)
    ptx.run(text, [Windows.X, Windows.OUT], range(last // threads, last // threads + 1), threads, memory)
    for start in starts:
        x, out = (memory.window(base, start).astype(np.float64) for base in (Windows.X, Windows.OUT))
        np.testing.assert_allclose(out[: cut.width], gelu(x[: cut.width], "erf"), rtol=2**-7, atol=1e-3)


class Windows(ptx.Memory):
    """Two matrices of bfloat16 of which only parts exist; all else reads as 0, and writes to it go nowhere."""

    X, OUT = 1 << 40, 2 << 40

    def __init__(self, starts: list[int], length: int, rng: np.random.Generator) -> None:
        super().__init__()
        self._windows = {
            (base, start): (rng.standard_normal(length) if base == self.X else np.full(length, np.nan)).astype(
                ml_dtypes.bfloat16
            )
            for base in (self.X, self.OUT)
            for start in starts
        }

    def window(self, base: int, start: int) -> np.ndarray:
        return self._windows[base, start]

    def at(self, address: int, size: int) -> np.ndarray:
        assert address % size == 0
        for (base, start), array in self._windows.items():
            offset = address - base - 2 * start
            if 0 <= offset <= array.nbytes - size:
                return array.view(np.uint8)[offset : offset + size]
        return np.zeros(size, np.uint8)
