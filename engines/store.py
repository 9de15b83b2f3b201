"""What planning found, kept on disk: a later process runs the same plan without a compiler or cuDNN's heuristics.

Three kinds of file below one folder: `plans/KEY` says which plan serves a graph on a target and why others do not,
`programs/SHA256` is a program, named by its content, and `records/KEY` is what autotuning measured. Files are written
aside and moved into place, so that many processes may share a folder and one that dies in the middle leaves nothing
half written. A file that does not hold what its name says is dropped and made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from cudnn_jax import __version__
from cudnn_jax.engines import trust
from cudnn_jax.engines.base import Decline, PlanConfig

FORMAT = 2

_ABANDONED_S = 3600.0


@dataclass(frozen=True)
class Stored:
    """The outcome of planning one graph on one target.

    Attributes:
      plan: what runs.
      plans: the ranked list.
      declines: why other engines or plans do not run.
      program: the artifact's bytes, None where the plan is inlined.
      derived: whether the program is of the graph that the family derives for the backend.
      release: the version of this package that planned.
    """

    plan: PlanConfig
    plans: tuple[PlanConfig, ...]
    declines: tuple[Decline, ...]
    program: bytes | None
    derived: bool
    release: str = __version__


class Store:
    """A folder of plans and programs, that is read only where nobody else can write.

    Args:
      limit: the most bytes of plans and programs, None for any number; the longest unused go first. Records stay.
    """

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self._folder = folder / f"v{FORMAT}"
        self._limit = limit

    @property
    def folder(self) -> Path:
        return self._folder

    def size(self) -> tuple[int, int, int]:
        """(plans, bytes of plans and programs, autotune records) that are kept."""
        plans, records = (
            [status.st_size for path, status in _files(self._folder / kind) if not path.name.startswith(".")]
            for kind in ("plans", "records")
        )
        programs = [status.st_size for _, status in _files(self._folder / "programs")]
        return len(plans), sum(plans) + sum(programs), len(records)

    def load(self, key: str) -> Stored | None:
        """What was stored under `key`, None if nothing sound is.

        Raises:
          UntrustedPathError: somebody else could have written what is there.
        """
        record = self._read_sealed("plans", key)
        if record is None:
            return None
        program = None
        if record["program"] is not None:
            program = self._read_program(record["program"])
            if program is None:
                return None
        return Stored(
            plan=config_of(record["plan"]),
            plans=tuple(map(config_of, record["plans"])),
            declines=tuple(Decline(*pair) for pair in record["declines"]),
            program=program,
            derived=record["derived"],
            release=record["release"],
        )

    def store(self, key: str, stored: Stored) -> None:
        """Keeps `stored`.

        Raises:
          OSError: the folder cannot be written.
        """
        digest = None
        if stored.program is not None:
            digest = hashlib.sha256(stored.program).hexdigest()
            self._write(self._folder / "programs" / digest, stored.program)
        record = {
            "plan": fields_of(stored.plan),
            "plans": [fields_of(plan) for plan in stored.plans],
            "declines": [[decline.engine, decline.reason] for decline in stored.declines],
            "program": digest,
            "derived": stored.derived,
            "release": stored.release,
        }
        self._write(self._folder / "plans" / key, _sealed(record))
        if self._limit is not None:
            self._shrink(self._limit)

    def load_record(self, key: str) -> dict[str, Any] | None:
        """The autotune record under `key`, None if nothing sound is.

        Raises:
          UntrustedPathError: somebody else could have written what is there.
        """
        return self._read_sealed("records", key)

    def store_record(self, key: str, record: Mapping[str, Any]) -> None:
        """Keeps an autotune record, in the place of an earlier one.

        Raises:
          OSError: the folder cannot be written.
        """
        self._write(self._folder / "records" / key, _sealed(record))

    def _read_sealed(self, kind: str, key: str) -> dict[str, Any] | None:
        path = self._folder / kind / key
        data = _read(path)
        try:
            return None if data is None else _opened(data)
        except (ValueError, KeyError, TypeError, msgpack.UnpackException):
            _drop(path)
            return None

    def _read_program(self, digest: str) -> bytes | None:
        path = self._folder / "programs" / digest
        data = _read(path)
        if data is not None and hashlib.sha256(data).hexdigest() != digest:
            _drop(path)
            return None
        return data

    def _write(self, path: Path, data: bytes) -> None:
        _make_private(path.parent)
        handle, aside = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(aside, path)
        except BaseException:
            _drop(Path(aside))
            raise

    def _shrink(self, limit: int) -> None:
        kept = []
        for kind in ("programs", "plans", "records"):
            for path, status in _files(self._folder / kind):
                if path.name.startswith("."):
                    if time.time() - status.st_mtime > _ABANDONED_S:
                        _drop(path)
                elif kind != "records":
                    kept.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= limit:
                break
            _drop(path)
            total -= size


def _read(path: Path) -> bytes | None:
    """A file's content, and a mark that it was used now; None where there is none."""
    if not path.exists():  # most often so for records, and cheaper to ask than whom the folders belong to
        return None
    try:
        data = trust.require(path).read_bytes()
    except trust.UntrustedPathError:
        raise
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return data


def _make_private(folder: Path) -> None:
    """Makes a folder and those above it that are not there, each for its owner alone whatever the umask."""
    if not folder.is_dir():
        _make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    if not folder.is_dir():  # nothing was kept of that kind
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process dropped it
                yield Path(entry.path), entry.stat()


def _drop(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _sealed(record: Mapping[str, Any]) -> bytes:
    body: bytes = msgpack.packb(record)
    return hashlib.sha256(body).digest() + body


def _opened(data: bytes) -> dict[str, Any]:
    seal, body = data[:32], data[32:]
    if hashlib.sha256(body).digest() != seal:
        raise ValueError("a damaged record")
    record: dict[str, Any] = msgpack.unpackb(body)
    return record


def fields_of(plan: PlanConfig) -> dict[str, Any]:
    """A plan in the types of a file."""
    return {
        "engine_id": plan.engine_id,
        "knobs": [list(pair) for pair in plan.knobs],
        "engine": plan.engine,
        "kind": plan.kind,
        "mode": plan.mode,
        "workspace": plan.workspace,
        "notes": sorted(plan.notes),
    }


def config_of(fields: Mapping[str, Any]) -> PlanConfig:
    """The plan of `fields_of`."""
    knobs = tuple((name, value) for name, value in fields["knobs"])
    return PlanConfig(**{**fields, "knobs": knobs, "notes": frozenset(fields["notes"])})
