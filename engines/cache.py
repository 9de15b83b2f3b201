"""Where planned programs are kept between processes, and under which keys.

Two folders are asked, in order. `CUDNN_JAX_PROGRAMS` names one that was filled ahead of time, for a GPU: its programs
are served whatever compilers are here. `CUDNN_JAX_CACHE_DIR` names the user's own cache (by default the platform's
cache folder; empty for none): its keys hold the versions of everything that a plan depends on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs

from cudnn_jax.engines import cutile, trust, versions
from cudnn_jax.engines.manifest import family_for
from cudnn_jax.engines.store import Store, Stored
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import pygraph

CACHE_VARIABLE = "CUDNN_JAX_CACHE_DIR"
CACHE_BYTES_VARIABLE = "CUDNN_JAX_CACHE_BYTES"
PROGRAMS_VARIABLE = "CUDNN_JAX_PROGRAMS"
DEFAULT_BYTES = 4 << 30


def load(graph: pygraph, target: Target, implementation: str | None) -> Stored | None:
    """What an earlier process planned for the frozen graph, or None. Programs are for GPUs: so is the cache."""
    if target.platform != "cuda":
        return None
    ahead, cache = ahead_of_time_store(), cache_store()
    found = ahead.load(portable_key(graph, target, implementation)) if ahead else None
    if found is None and cache:
        found = cache.load(local_key(graph, target, implementation))
    return found


def keep(graph: pygraph, target: Target, implementation: str | None, stored: Stored) -> None:
    """Keeps a plan for later processes, in the user's cache."""
    cache = cache_store() if target.platform == "cuda" else None
    if cache:
        cache.store(local_key(graph, target, implementation), stored)


def ahead_of_time_store() -> Store | None:
    """The folder of `CUDNN_JAX_PROGRAMS`; an error where it is missing, or somebody else could write into it."""
    folder = os.environ.get(PROGRAMS_VARIABLE)
    return Store(_trusted(folder)) if folder else None


def cache_store() -> Store | None:
    """The user's cache, None where it is switched off."""
    folder = os.environ.get(CACHE_VARIABLE, str(_default_folder()))
    if not folder:
        return None
    trusted = _own(folder)
    return Store(trusted, int(os.environ.get(CACHE_BYTES_VARIABLE, DEFAULT_BYTES))) if trusted else None


@functools.lru_cache(maxsize=16)
def _trusted(folder: str) -> Path:
    return trust.require(Path(folder))


@functools.lru_cache(maxsize=16)
def _own(folder: str) -> Path | None:
    """The cache's folder, made if need be; None, with one warning, where it cannot serve. Planning goes on without."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        return trust.require(Path(folder))
    except OSError as error:
        warnings.warn(
            f"programs are not kept between processes: {error}; {CACHE_VARIABLE} names another folder", stacklevel=2
        )
        return None


def portable_key(graph: pygraph, target: Target, implementation: str | None) -> str:
    """The key of a program that was made for a kind of GPU, wherever it was made."""
    return _digest(_what(graph, target, implementation))


def local_key(graph: pygraph, target: Target, implementation: str | None) -> str:
    """The key of a plan that was ranked and built with the versions that are here."""
    family = family_for(graph)
    offered = [slot.name for slot in family.slots if slot.offered()] if family else []
    return _digest({**_what(graph, target, implementation), "offered": offered, "versions": _versions()})


def _what(graph: pygraph, target: Target, implementation: str | None) -> dict[str, Any]:
    return {
        "graph": graph.hash(),
        "device": target.device_kind,
        "sm": target.sm,
        "sm_count": target.sm_count,
        "implementation": implementation,
    }


@functools.cache
def _versions() -> dict[str, Any]:
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
    }


def _or_none(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except ImportError:
        return None


def _fingerprint() -> str:
    """Tells one state of the engines' sources from another, so that a changed kernel is compiled again."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        status = path.stat()
        digest.update(f"{path.relative_to(root)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@functools.cache
def _default_folder() -> Path:
    return platformdirs.user_cache_path("cudnn_jax", appauthor=False)


def _digest(what: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
