"""The Gated DeltaNet programs of the tests over several GPUs: of the whole, and of what one device holds of it."""

from __future__ import annotations

from collections.abc import Iterator

from cudnn_jax._sites import sites
from cudnn_jax._target import ahead_of_time
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import Target
from gpu import first_calls
from support.over_devices import COUNT, SPLITS, both, described, share

SIZES = (4, 160, 4, 64)
DTYPE = "bfloat16"


def programs(target: Target) -> Iterator[tuple[pygraph, None]]:
    """Every graph, with the plan that a call without a name runs."""
    for sizes in (SIZES, *(share(SIZES, split, COUNT) for split in SPLITS)):
        yield from _of(sizes, target)
    yield from first_call(target)


def first_call(target: Target) -> Iterator[tuple[pygraph, None]]:
    return _of(first_calls.SIZES["gpu"], target)


def _of(sizes: tuple[int, ...], target: Target) -> Iterator[tuple[pygraph, None]]:
    with ahead_of_time(target):
        found = sites(both("gdn"), *described("gdn", sizes, DTYPE))
    for site in found:
        yield site.graph(), None
