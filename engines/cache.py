"""Where planned programs are kept between processes, and under which keys.

Two folders are asked, in order. `CUDNN_JAX_PROGRAMS` names one that was filled ahead of time, for a GPU: its programs
are served whatever compilers are here. `CUDNN_JAX_CACHE_DIR` names the user's own cache (by default the platform's
cache folder; empty for none): its keys hold the versions of everything that a plan depends on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs

from cudnn_jax import _ffi
from cudnn_jax import graph as graph_room
from cudnn_jax.engines import cutile, trust, versions
from cudnn_jax.engines.base import PlanConfig
from cudnn_jax.engines.manifest import family_for, opt_ins
from cudnn_jax.engines.store import Store, Stored
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import pygraph

CACHE_VARIABLE = "CUDNN_JAX_CACHE_DIR"
CACHE_BYTES_VARIABLE = "CUDNN_JAX_CACHE_BYTES"
PROGRAMS_VARIABLE = "CUDNN_JAX_PROGRAMS"
DEFAULT_BYTES = 4 << 30


def found(
    graph: pygraph, target: Target, implementation: str | None, chosen: PlanConfig | None = None
) -> Iterator[tuple[Stored, str]]:
    """What earlier processes planned for the frozen graph, and where it was found; the best first.

    Programs are for GPUs: so is the cache. Of a plan that a record of this machine has `chosen`, only what was made for
    that record is found.

    Raises:
      OSError: the folder of `CUDNN_JAX_PROGRAMS` is not there, or somebody else could write into it.
    """
    if target.platform != "cuda":
        return
    ahead = ahead_of_time_store()
    if ahead and chosen is None and (stored := ahead.load(portable_key(graph, target, implementation))):
        yield stored, f"{PROGRAMS_VARIABLE}, made by cudnn_jax {stored.release}"
    cache = cache_store()
    if cache:
        try:
            stored = cache.load(local_key(graph, target, implementation, chosen))
        except OSError as error:
            warn_unread(error)
            return
        if stored:
            yield stored, "cache"


def keep(
    graph: pygraph, target: Target, implementation: str | None, stored: Stored, chosen: PlanConfig | None = None
) -> None:
    """Keeps a plan for later processes, in the user's cache. One that cannot be written costs the next a plan."""
    cache = cache_store() if target.platform == "cuda" else None
    if cache:
        with contextlib.suppress(OSError):
            cache.store(local_key(graph, target, implementation, chosen), stored)


def ahead_of_time_store() -> Store | None:
    """The folder of `CUDNN_JAX_PROGRAMS`."""
    folder = os.environ.get(PROGRAMS_VARIABLE)
    return Store(trust.require(folder)) if folder else None


def cache_store() -> Store | None:
    """The user's cache, None where it is switched off or there is no place for it."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder is None:
        folder = _default_folder()
    return Store(Path(folder), _limit()) if folder else None


def _limit() -> int:
    given = os.environ.get(CACHE_BYTES_VARIABLE, str(DEFAULT_BYTES))
    if not given.isdecimal():
        raise ValueError(f"{CACHE_BYTES_VARIABLE} is {given!r}; the rule: a number of bytes, such as {DEFAULT_BYTES}")
    return int(given)


def warn_unread(error: Exception) -> None:
    """Says once why the cache does not serve. Planning goes on without it."""
    _warn(str(error))


@functools.lru_cache(maxsize=16)
def _warn(problem: str) -> None:
    warnings.warn(f"no plan is taken from the cache: {problem}; {CACHE_VARIABLE} names another folder", stacklevel=2)


def record_key(graph: pygraph, target: Target) -> str:
    """The key of an autotune record: what was measured, and on which kind of device."""
    return _digest(_what(graph, target, None))


def portable_key(graph: pygraph, target: Target, implementation: str | None) -> str:
    """The key of a program that was made for a kind of GPU, wherever it was made."""
    return _digest(_what(graph, target, implementation))


def local_key(graph: pygraph, target: Target, implementation: str | None, chosen: PlanConfig | None = None) -> str:
    """The key of a plan that was ranked, or chosen by a record, and built with the versions that are here."""
    family = family_for(graph)
    engines = [slot.name for slot in family.slots] if family else []
    # Variables of the DSLs change what they compile.
    variables = {name: value for name, value in os.environ.items() if name.startswith(("CUTE_DSL_", "CUDA_TILE_"))}
    here = {"engines": engines, "opt_ins": opt_ins(family), "variables": variables, "versions": versions_here()}
    identity = None if chosen is None else [chosen.engine_id, chosen.knobs]
    return _digest({**_what(graph, target, implementation), **here, "chosen": identity})


def _what(graph: pygraph, target: Target, implementation: str | None) -> dict[str, Any]:
    return {
        "graph": graph.hash(),
        "device": target.device_kind,
        "sm": target.sm,
        "sm_count": target.sm_count,
        # Programs of CuTe-DSL hold code for the host.
        "host": platform.machine(),
        "implementation": implementation,
    }


@functools.cache
def versions_here() -> dict[str, Any]:
    """The version of everything that a plan depends on, None for what is not here."""
    from cudnn_jax import __version__

    here = versions.versions()
    return {
        "cudnn_jax": __version__,
        "sources": _fingerprint(),
        "cudnn": here.cudnn,
        "cudnn_frontend": here.cudnn_frontend,
        "cutedsl": here.cutedsl,
        "missing": dict(here.missing),
        "cutile": _or_none(cutile.compiler_versions),
        # cuDNN compiles with it, and has other plans without.
        "nvrtc": _or_none(lambda: importlib.metadata.version("nvidia-cuda-nvrtc")),
    }


def _or_none(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except ImportError:
        return None


def _fingerprint() -> str:
    """Tells one state of the sources that make plans from another, so that a changed kernel is compiled again."""
    digest = hashlib.sha256()
    folders = {"engines": Path(__file__).parent, "graph": Path(graph_room.__file__).parent}
    sources = [(name, folder, path) for name, folder in folders.items() for path in sorted(folder.rglob("*.py"))]
    for name, folder, path in (*sources, ("ffi", Path(_ffi.__file__).parent, Path(_ffi.__file__))):
        status = path.stat()
        digest.update(f"{name}/{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@functools.cache
def _default_folder() -> str:
    try:
        return str(platformdirs.user_cache_path("cudnn_jax", appauthor=False))
    except RuntimeError:  # a user without a home
        return ""


def _digest(what: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
