"""Writes the type stub of the extension: make_stub.py [FILE], to ffi/_ffi.pyi unless told otherwise.

Needs the project installed, and nanobind.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from nanobind.stubgen import StubGen

STUB = Path(__file__).resolve().parents[1] / "_ffi.pyi"
REPLACEMENTS = {
    # The generator sees a tuple and not what is in it.
    "XLA_FFI_API_VERSION: tuple = (0, 3)": "XLA_FFI_API_VERSION: tuple[int, int] = ...",
    # One blank line after the imports, as the formatter wants it.
    "\n\n\nclass ": "\n\nclass ",
}


def text() -> str:
    generator = StubGen(importlib.import_module("cudnn_jax._ffi"))
    generator.put(generator.module)
    generated: str = generator.get()
    for old, new in REPLACEMENTS.items():
        generated = generated.replace(old, new)
    return generated.strip() + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else STUB).write_text(text(), encoding="utf-8")
