"""The plan database: which plan of a graph was the fastest on a kind of device, as autotuning measured it.

A record is kept in the user's cache, where any process finds it, or in this process alone where there is no such place.
It is heeded by `planning.plan`, ahead of the ranking, as long as what it was measured with is what is here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cudnn_jax.engines import cache
from cudnn_jax.engines.base import PlanConfig
from cudnn_jax.engines.store import config_of, fields_of
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import pygraph

_MATTER = ("cudnn_jax", "cudnn", "cutedsl", "cutile")
"""Of what a plan depends on. With other versions than it was measured with, a record may name a slow plan, or none."""


@dataclass(frozen=True)
class Record:
    """The fastest plan of one graph on one kind of device, its median time, and the versions that it ran with."""

    plan: PlanConfig
    ms: float
    versions: Mapping[str, Any] = field(default_factory=lambda: _versions(), hash=False)

    def outdated(self) -> str | None:
        """Why the record does not hold any more, or None."""
        here = _versions()
        changed = [name for name in here if self.versions.get(name) != here[name]]
        return ", ".join(f"{name} was {self.versions.get(name)} and is {here[name]}" for name in changed) or None


_unkept: dict[str, Record] = {}
_ignored: set[tuple[str, Record]] = set()


def find(graph: pygraph, target: Target) -> Record | None:
    """The record of a frozen graph. Another process may have written it a moment ago."""
    if not target.device_kind:
        return None
    key = cache.record_key(graph, target)
    store = cache.cache_store()
    if key in _unkept or store is None:
        return _unkept.get(key)
    try:
        found = store.load_record(key)
    except OSError as error:
        cache.warn_unread(error)
        return None
    if not found:
        return None
    try:
        return Record(config_of(found["plan"]), found["ms"], found["versions"])
    except (KeyError, TypeError):  # of another release
        cache.warn_unread(ValueError("an autotune record has other fields"))
        return None


def keep(graph: pygraph, target: Target, record: Record) -> str | None:
    """Keeps a record in the place of an earlier one. Why only this process will know of it, None if all will."""
    key = cache.record_key(graph, target)
    store = cache.cache_store()
    try:
        if store is None:
            raise OSError(f"there is no cache: {cache.CACHE_VARIABLE} names a folder for one")
        store.store_record(key, {"plan": fields_of(record.plan), "ms": record.ms, "versions": dict(record.versions)})
        store.load_record(key)  # raises where nobody would read it
    except OSError as error:
        _unkept[key] = record
        return str(error)
    _unkept.pop(key, None)
    return None


def ignore(graph: pygraph, target: Target, record: Record, subject: str, reason: str) -> None:
    """Says once in a process why a record is not heeded."""
    what = (cache.record_key(graph, target), record)
    if what not in _ignored:
        _ignored.add(what)
        warnings.warn(
            f"the autotune record {record.plan.name} of {subject} is ignored: {reason}; autotune again", stacklevel=2
        )


def forget_unkept() -> None:
    """Forgets what this process alone knows."""
    _unkept.clear()
    _ignored.clear()


def _versions() -> dict[str, Any]:
    here = cache.versions_here()
    return {name: here[name] for name in _MATTER}
