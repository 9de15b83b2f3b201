"""Everything here needs a GPU that JAX sees; without one it is skipped, and says so."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest


def _missing() -> str | None:
    try:
        jax.local_devices(backend="cuda")
    except RuntimeError as error:
        return f"no CUDA device in JAX: {str(error).splitlines()[0]}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    reason = _missing() if ours else None
    for item in ours:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
