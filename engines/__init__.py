"""Planning, the engines that run graphs, and what they are planned for.

`cudnn_jax.engines.target` and the other modules that callers name are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_MODULES = ("base", "manifest", "notes", "planning", "program", "target", "versions")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
