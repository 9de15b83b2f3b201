"""Shared fixtures. The CPU is seen as 8 devices, so that sharding can be tested anywhere."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import numpy as np
import pytest

_FLAG = "--xla_force_host_platform_device_count=8"
if _FLAG.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What compiles C++ goes first, and to one process, which then compiles each part once."""
    native = [item for item in items if item.get_closest_marker("native")]
    for item in native:
        item.add_marker(pytest.mark.xdist_group("native"))
    items[:] = [*native, *(item for item in items if item not in native)]


@pytest.fixture(autouse=True, scope="session")
def _no_cache_of_the_user() -> Iterator[None]:
    """What tests plan is neither kept nor found; a test of the cache names a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDNN_JAX_CACHE_DIR", "")
        yield


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A fresh seed every run, printed with a failure."""
    seed = int(os.environ.get("CUDNN_JAX_TEST_SEED", secrets.randbits(32)))
    request.node.add_report_section("setup", "seed", f"CUDNN_JAX_TEST_SEED={seed}")
    return np.random.default_rng(seed)
