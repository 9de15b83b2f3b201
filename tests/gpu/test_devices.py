"""Several GPUs in one process: each alone, split over them, and first calls at the same time.

Outputs and workspace are NaN before each program runs. Programs of Gated DeltaNet are compiled here or served by the
folder that `gpu.ahead` filled; cuDNN plans attention here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import pytest

import cudnn_jax
from cudnn_jax._sites import sites
from cudnn_jax.engines import cache
from cudnn_jax.engines.target import local
from gpu import devices_programs, first_calls
from gpu.poison import poisoned_outputs
from gpu.running import sanitizer, skip_without_programs
from gpu.sanitized import environment
from support.over_devices import COUNT, OPERATIONS, OverDevices, both, described

pytestmark = pytest.mark.skipif(jax.local_device_count() < COUNT, reason=f"fewer than {COUNT} GPUs")

ENGINES = {"sdpa": "cudnn", "gdn": "cutile_gdn"}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with poisoned_outputs(monkeypatch):
        yield


class TestGpus(OverDevices):
    sizes = devices_programs.SIZES
    dtype = devices_programs.DTYPE
    programs = 2

    @pytest.fixture(params=OPERATIONS)
    def name(self, request: pytest.FixtureRequest) -> str:
        if request.param == "gdn":
            skip_without_programs()
        return request.param

    def test_engines(self, name: str) -> None:
        told = cudnn_jax.explain(both(name), *described(name, self.sizes, self.dtype))
        assert told.engines() == {f"{name}_fwd": ENGINES[name], f"{name}_bwd": ENGINES[name]}

    def test_plans_and_records_are_of_a_kind_of_device(self, name: str) -> None:
        """Devices of one kind share them, whichever was first."""
        devices = jax.local_devices()[:COUNT]
        targets = [local(device.local_hardware_id) for device in devices]
        assert [target.device_kind for target in targets] == [device.device_kind for device in devices]
        for site in sites(both(name), *described(name, self.sizes, self.dtype)):
            graph = site.graph()
            graph.freeze()
            for key_of in (cache.record_key, partial(cache.portable_key, implementation=None)):
                keys = {target.device_kind: key_of(graph, target) for target in targets}
                assert {key_of(graph, target) for target in targets} == set(keys.values())
                assert key_of(graph, replace(targets[0], device_kind="another GPU")) not in keys.values()


def test_first_calls_at_the_same_time() -> None:
    """In processes whose calls come in turn, each device has one handle of cuDNN, and one more planned."""
    skip_without_programs()
    said = first_calls.processes(50, at_once=max(2, min(10, (os.cpu_count() or 2) // 3)), timeout=150)
    in_turn = [text for text in said if "in backwards" in text]
    assert in_turn and all(f"{COUNT + 1} handles of cuDNN" in text for text in in_turn), in_turn


def test_first_calls_under_a_sanitizer() -> None:
    skip_without_programs()
    (text,) = first_calls.processes(1, at_once=1, timeout=240, prefix=sanitizer("memcheck"), environment=environment())
    assert "0 errors" in text, text[-2000:]
