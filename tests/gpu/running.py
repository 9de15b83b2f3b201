"""A graph run with a named plan, which a compiler here makes or a folder of programs serves; modules run as processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax.engines import cache, cutile
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.graph import GraphNotSupportedError
from support.gdn_cases import Case
from support.linear_attention import Arrays


def run(graph: pygraph, arrays: Sequence[Any], implementation: str) -> tuple[jax.Array, ...]:
    """The graph's outputs; skips, with the reason, where there is neither the compiler nor a folder."""
    fn = jax.jit(lambda *given: cudnn_jax.call(graph, *given, implementation=implementation))
    with jax.enable_x64(True):  # offsets of 64 bits stay what they are
        return served(fn, *map(jnp.asarray, arrays))


def served(fn: Callable[..., Any], *arguments: Any) -> Any:
    """What a function that names plans returns; skips, with the reason, where nothing makes or serves them."""
    try:
        return fn(*arguments)
    except GraphNotSupportedError as error:
        skip_without_programs()
        raise error


def check_twice(case: Case, given: Arrays, implementation: str, want: Arrays) -> list[np.ndarray]:
    """A case's outputs, checked against the float64 ones, and of the same bits in a second run."""
    graph = case.graph(given)
    arrays = [given[tensor.name] for tensor in graph.inputs]
    first, second = ([np.asarray(array) for array in run(graph, arrays, implementation)] for _ in range(2))
    case.check(graph, first, want, given)
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), two.view(np.uint8), implementation)
    return first


def skip_without_programs() -> None:
    """Skips, with the reason, where there is neither the compiler nor a folder of programs."""
    try:
        cutile.available()
    except ImportError as missing:
        if cache.ahead_of_time_store() is None:
            pytest.skip(f"{missing}; CUDNN_JAX_PROGRAMS names no folder")


def child(
    module: str, *arguments: str, environment: Mapping[str, str], prefix: tuple[str, ...] = (), timeout: float = 400
) -> str:
    """Runs a module in a process of its own; returns what it printed."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": path, **environment}
    command = [*prefix, sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own, timeout=timeout)
    assert done.returncode == 0, done.stdout[:3000] + done.stderr[-3000:]
    return done.stdout


def sanitizer(tool: str) -> tuple[str, ...]:
    """The command in front of a process that compute-sanitizer is to watch; skips where there is none."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        pytest.skip("no compute-sanitizer")
    # Calls that fail on purpose are not reported: a kernel's parameters are counted by asking until there is no more.
    options = ("--report-api-errors", "no") if tool == "memcheck" else ()
    return program, "--tool", tool, "--error-exitcode", "9", *options
