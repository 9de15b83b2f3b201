"""A stand-in engine and the C function it runs, injected through the manifest as real engines are."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cudnn_jax import _ffi
from cudnn_jax.engines import manifest
from cudnn_jax.engines.base import Artifact, BaseEngine, PlanConfig
from cudnn_jax.engines.program import ProgramBuilder, arguments
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, pygraph

SYMBOL = "standin_mix"
SOURCE = r"""
#include <stdint.h>
/* out = q + 10 k + 100 v, elementwise: tells the order of its operands. */
void standin_mix(void* const* args, const int64_t* nbytes, int64_t n) {
  const float *q = args[0], *k = args[1], *v = args[2];
  float* out = args[3];
  (void)n;
  for (int64_t i = 0; i < nbytes[3] / 4; ++i) out[i] = q[i] + 10 * k[i] + 100 * v[i];
}
"""
_loaded: list[ctypes.CDLL] = []


def register_symbol(folder: Path) -> None:
    """Compiles the C function and makes it known to the extension."""
    if _loaded:
        return
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    assert compiler, "the tests need a C compiler"
    source, library = folder / "standin.c", folder / "standin.so"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    loaded = ctypes.CDLL(str(library))
    _loaded.append(loaded)
    address = ctypes.cast(loaded.standin_mix, ctypes.c_void_p).value
    assert address is not None
    _ffi.register_host_symbol(SYMBOL, address)


class Mix(BaseEngine):
    """Serves forward attention graphs on the CPU with q + 10 k + 100 v."""

    name = "mix"
    kind = "test"

    def configs(self, graph: pygraph, facts: Any, target: Target) -> Sequence[tuple[tuple[str, int], ...]]:
        if target.platform != "cpu":
            raise GraphNotSupportedError(f"platform {target.platform}, serves cpu")
        return [()]

    def build_plan(self, graph: pygraph, facts: Any, config: PlanConfig, target: Target) -> Artifact:
        form = graph.canonical()
        node = next(node for node in form["nodes"] if node["type"] == "SDPA")
        order = [node["inputs"][port] for port in ("q", "k", "v")] + [node["outputs"]["O"]]
        builder = ProgramBuilder(graph, target)
        offset = builder.workspace(512)
        builder.step("fill", dest=("workspace", offset), value=7, width=1, bytes=512)
        if "Stats" in facts.results:
            stats = arguments(graph, [node["outputs"]["Stats"]])[0]
            builder.step("fill", dest=stats, value=0, width=1, bytes=4 * facts.batch * facts.q_heads * facts.q_len)
        builder.step("host", symbol=SYMBOL, args=arguments(graph, order))
        return builder.build()


@contextmanager
def family(monkeypatch: pytest.MonkeyPatch, name: str, *slots: manifest.EngineSlot, **changes: Any) -> Iterator[None]:
    """The manifest with `slots` in front of a family's own engines."""
    with monkeypatch.context() as patch:
        old = manifest.FAMILIES[name]
        patch.setitem(manifest.FAMILIES, name, dataclasses.replace(old, slots=(*slots, *old.slots), **changes))
        yield
