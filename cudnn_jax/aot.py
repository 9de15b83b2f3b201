"""Ahead of time: programs for a GPU that is not on this machine.

Two ways. `target` lowers for another GPU, so that `jax.export` carries the programs inside of the exported function.
`build` fills a folder with programs, which a process on that GPU is served from when `CUDNN_JAX_PROGRAMS` names it: it
then needs no DSL compiler and asks cuDNN for no plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cudnn_jax._sites import Site, sites
from cudnn_jax._target import ahead_of_time
from cudnn_jax.engines import cache
from cudnn_jax.engines import target as _target
from cudnn_jax.engines.planning import stored_of
from cudnn_jax.engines.store import Store


@contextlib.contextmanager
def target(name: str) -> Iterator[None]:
    """Lowers every operation traced inside for the GPU called `name`, such as "h200".

    Use it around an export, which has to be told that our custom call is meant to be in it:

        with cudnn_jax.aot.target("h200"):
            exported = jax.export.export(
                jax.jit(fn),
                platforms=["cuda"],
                disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("cudnn_jax.program")],
            )(*shapes)

    Planning with cuDNN needs a libcuda and a libcudnn that can be opened; without one the reference engine is lowered,
    and `explain` says so.

    Raises:
      ValueError: the name is not one of `known_targets()`.
    """
    with ahead_of_time(_target.named(name)):
        yield


def build(fn: Callable[..., Any], *args: Any, target: str, out: str | Path) -> list[Site]:
    """Plans and builds every operation of this package in `fn` for another GPU, into a folder.

    Args:
      fn: a function, jitted or not. Give `jax.grad` of a function for its backward operations.
      *args: arrays or `jax.ShapeDtypeStruct`s to trace it on.
      target: one of `known_targets()`.
      out: the folder for `CUDNN_JAX_PROGRAMS`; programs of several functions and targets may share one.

    Returns:
      What was built, one entry for each distinct operation.

    Raises:
      ValueError: the target is not known.
      GraphNotSupportedError: nothing serves an operation there; the message holds every engine's reason.
    """
    gpu = _target.named(target)
    with ahead_of_time(gpu):
        found = sites(fn, *args)
    store = Store(Path(out))
    for site in found:
        planned, graph = site.plan(gpu), site.graph()
        graph.freeze()
        store.store(cache.portable_key(graph, gpu, site.config.implementation), stored_of(planned))
    return found


def known_targets() -> list[str]:
    """The names that `target` accepts."""
    return _target.known_devices()
