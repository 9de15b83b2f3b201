"""Ahead-of-time lowering: programs for a GPU that is not on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cudnn_jax._target import ahead_of_time
from cudnn_jax.engines import target as _target


@contextlib.contextmanager
def target(name: str) -> Iterator[None]:
    """Lowers every operation traced inside for the GPU called `name`, such as "h200".

    Use it around `jax.export.export(..., platforms=["cuda"])`.

    Raises:
      ValueError: the name is not one of `known_targets()`.
    """
    with ahead_of_time(_target.named(name)):
        yield


def known_targets() -> list[str]:
    """The names that `target` accepts."""
    return _target.known_devices()
