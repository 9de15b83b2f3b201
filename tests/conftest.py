"""Shared fixtures. The CPU is seen as 8 devices, so that sharding can be tested anywhere."""

from __future__ import annotations

import os
import secrets

import numpy as np
import pytest

_FLAG = "--xla_force_host_platform_device_count=8"
if _FLAG.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A fresh seed every run, printed with a failure."""
    seed = int(os.environ.get("CUDNN_JAX_TEST_SEED", secrets.randbits(32)))
    request.node.add_report_section("setup", "seed", f"CUDNN_JAX_TEST_SEED={seed}")
    return np.random.default_rng(seed)
