"""A graph run with a named plan, which a compiler here makes or a folder of programs serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import cudnn_jax
from cudnn_jax.engines import cache, cutile
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.graph import GraphNotSupportedError


def run(graph: pygraph, arrays: Sequence[Any], implementation: str) -> tuple[jax.Array, ...]:
    """The graph's outputs; skips, with the reason, where there is neither the compiler nor a folder."""
    fn = jax.jit(lambda *given: cudnn_jax.call(graph, *given, implementation=implementation))
    try:
        with jax.enable_x64(True):  # offsets of 64 bits stay what they are
            return fn(*map(jnp.asarray, arrays))
    except GraphNotSupportedError as error:
        try:
            cutile.available()
        except ImportError as missing:
            if cache.ahead_of_time_store() is None:
                pytest.skip(f"{missing}; CUDNN_JAX_PROGRAMS names no folder")
        raise error
