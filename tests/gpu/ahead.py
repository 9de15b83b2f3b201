"""`python -m gpu.ahead FOLDER [NAME ...]`: builds programs for an H200 where the compilers are and no GPU, all or those
of the names in the tables below.

`CUDNN_JAX_PROGRAMS=FOLDER/tests` then serves the GPU tests, whose programs fill outputs and workspace with NaN before
they do anything else, and `FOLDER/benchmarks` the benchmarks. `FOLDER/sanitizer` is what is run under a sanitizer.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gdn, kda, norm, pointwise, scaling, train_lm
from cudnn_jax.engines import cache, planning
from cudnn_jax.engines.base import Program
from cudnn_jax.engines.planning import pygraph, stored_of
from cudnn_jax.engines.store import Store
from cudnn_jax.engines.target import Target, named
from gpu import (
    devices_programs,
    gdn_backward_programs,
    gdn_programs,
    gdn_recurrent_programs,
    kda_programs,
    linear_once,
    norm_programs,
    pointwise_programs,
)
from gpu.poison import poisoned_outputs
from gpu.sanitized import without_tma


def fill(folder: Path, target: Target, programs: Iterator[tuple[pygraph, str | None]]) -> int:
    """Builds each graph with the named plan into a folder that `CUDNN_JAX_PROGRAMS` may name; returns how many."""
    store, count = Store(folder), 0
    for graph, implementation in programs:
        planned = planning.plan(graph, target, implementation)
        assert isinstance(planned.artifact, Program)
        key = cache.portable_key(graph, target, implementation)
        store.store(key, stored_of(planned))
        count += 1
    return count


Programs = Callable[[Target], Iterator[tuple[pygraph, Any]]]
BENCHMARKS: dict[str, Programs] = {
    "norm": lambda _: norm.programs(),
    "pointwise": pointwise.programs,
    "gdn": gdn.programs,
    "kda": kda.programs,
    "scaling": scaling.programs,
    "train_lm": train_lm.programs,
}
TESTS: dict[str, Programs] = {
    "norm": lambda _: norm_programs.programs(),
    "pointwise": pointwise_programs.programs,
    "gdn": lambda _: gdn_programs.programs(),
    "gdn_recurrent": lambda _: gdn_recurrent_programs.programs(),
    "gdn_backward": lambda _: gdn_backward_programs.programs(),
    "kda": kda_programs.programs,
    "devices": devices_programs.programs,
}
SANITIZER: dict[str, Programs] = {
    "linear": lambda _: linear_once.programs(),
    "devices": devices_programs.first_call,
}


def chosen(table: dict[str, Programs], names: Sequence[str], target: Target) -> Iterator[tuple[pygraph, Any]]:
    """Those of the names, or all where none is given."""
    return itertools.chain(*(programs(target) for name, programs in table.items() if name in (names or table)))


def main(argv: list[str]) -> int:
    if not argv or not {*argv[1:]} <= {*BENCHMARKS, *TESTS, *SANITIZER}:
        print(__doc__, file=sys.stderr)
        return 2
    folder, names, target = Path(argv[0]), argv[1:], named("h200")
    print(fill(folder / "benchmarks", target, chosen(BENCHMARKS, names, target)), "programs of benchmarks")
    with poisoned_outputs(pytest.MonkeyPatch()):
        planning.clear_memo()  # those were not poisoned
        print(fill(folder / "tests", target, chosen(TESTS, names, target)), "programs of tests")
    with pytest.MonkeyPatch().context() as monkeypatch:
        without_tma(monkeypatch)
        planning.clear_memo()
        print(fill(folder / "sanitizer", target, chosen(SANITIZER, names, target)), "programs for a sanitizer")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
