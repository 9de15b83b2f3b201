"""Operations on each of several CPU devices, alone and split; tests/gpu/test_devices.py is the same on GPUs."""

from __future__ import annotations

import jax
import pytest

from gpu import first_calls
from support.attention.harness import QUICK
from support.over_devices import COUNT, OverDevices

if jax.device_count() < COUNT or jax.default_backend() != "cpu":
    pytest.skip("needs devices of a CPU; tests/conftest.py asks XLA for them", allow_module_level=True)


class TestSdpa(OverDevices):
    sizes = (2, 3, 2, 4)
    dtype = "float32"
    programs = 0
    options = QUICK
    ways = ("shard_map",)  # test_sharding.py has the other

    @pytest.fixture
    def name(self) -> str:
        return "sdpa"


class TestGdn(TestSdpa):
    test_split = None  # in test_sharding.py

    @pytest.fixture
    def name(self) -> str:
        return "gdn"


def test_first_calls_at_the_same_time() -> None:
    first_calls.processes(2, at_once=2, timeout=120)
