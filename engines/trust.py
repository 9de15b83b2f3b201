"""Whether programs may be read from a place that somebody named: a program is code, so only from the user's own.

A path is trusted when nobody but the user and root can change what is found there: it and every folder above it belong
to one of the two and are writable by no group and no others. One exception: a folder above may be writable by all if it
is root's and sticky, as /tmp is, where nobody can replace what belongs to another.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_SHARED = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


class UntrustedPathError(PermissionError):
    """Somebody else can change what is at a path."""


def require(path: str | os.PathLike[str]) -> Path:
    """The real path of a file or a folder that is trusted. Read that one: a link may be turned after the look.

    Raises:
      UntrustedPathError: names the file or folder that somebody else can change, and the rule.
      OSError: the path is not there, or cannot be looked at.
    """
    real = Path(path).resolve(strict=True)
    problem = _problem(real, leaf=True) or next(
        filter(None, (_problem(above, leaf=False) for above in real.parents)), None
    )
    if problem:
        raise UntrustedPathError(f"{path}: {problem}; a program is code, and this one is not only yours to write")
    return real


def reason_against(path: str | os.PathLike[str]) -> str | None:
    """Why `require` would refuse, None if it would not."""
    try:
        require(path)
    except UntrustedPathError as error:
        return str(error)
    return None


def _problem(path: Path, *, leaf: bool) -> str | None:
    status = path.lstat()
    if status.st_uid not in (_ROOT, os.getuid()):
        return f"{path} belongs to user {status.st_uid}, the rule is yours ({os.getuid()}) or root's"
    mode = stat.S_IMODE(status.st_mode)
    sticky_above = not leaf and status.st_uid == _ROOT and bool(mode & stat.S_ISVTX)
    if mode & _SHARED and not sticky_above:
        return f"{path} has mode {mode:04o}, the rule is writable by its owner alone"
    return None
