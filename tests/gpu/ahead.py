"""`python -m gpu.ahead FOLDER`: builds programs for an H200 where the compilers are and no GPU.

`CUDNN_JAX_PROGRAMS=FOLDER/tests` then serves the GPU tests, whose programs fill outputs and workspace with NaN before
they do anything else, and `FOLDER/benchmarks` the benchmarks. `FOLDER/sanitizer` is what is run under a sanitizer.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import gdn, norm, pointwise, scaling
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


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    os.environ |= {f"CUDNN_JAX_CUTILE_{name}": "1" for name in ("GDN", "KDA")}
    folder, target = Path(argv[0]), named("h200")
    benchmarks = itertools.chain(
        norm.programs(), pointwise.programs(target), gdn.programs(target), scaling.programs(target)
    )
    print(fill(folder / "benchmarks", target, benchmarks), "programs of benchmarks")
    with poisoned_outputs(pytest.MonkeyPatch()):
        planning.clear_memo()  # those were not poisoned
        ours = (norm_programs, gdn_programs, gdn_recurrent_programs, gdn_backward_programs)
        targeted = (pointwise_programs, devices_programs, kda_programs)
        tests = itertools.chain(*(each.programs() for each in ours), *(each.programs(target) for each in targeted))
        print(fill(folder / "tests", target, tests), "programs of tests")
    with pytest.MonkeyPatch().context() as monkeypatch:
        linear_once.without_tma(monkeypatch)
        planning.clear_memo()
        print(fill(folder / "sanitizer", target, linear_once.programs()), "programs for a sanitizer")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
