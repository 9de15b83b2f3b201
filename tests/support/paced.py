"""A stand-in engine whose plans are attention, each as slow, as wrong or as unwilling as its name says."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudnn_jax.engines.base import Artifact, BaseEngine, Inline, PlanConfig
from cudnn_jax.engines.manifest import EngineSlot
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, pygraph

SLOT = EngineSlot(1, "paced", ("support.paced", "Paced"))
RAN: list[str] = []
"""The plans that ran, call by call."""
SETTINGS = [
    (("ms", 20), ("wrong", 0)),
    (("ms", 0), ("wrong", 1)),
    (("ms", -1), ("wrong", 0)),
    (("ms", 1), ("wrong", 0)),
]
SLOW, WRONG, DECLINES, FAST = (f"paced:ms={dict(each)['ms']},wrong={dict(each)['wrong']}" for each in SETTINGS)


class Paced(BaseEngine):
    """Plain attention in NumPy, and a pause."""

    name = "paced"
    kind = "test"

    def configs(self, graph: pygraph, facts: Any, target: Target) -> Sequence[tuple[tuple[str, int], ...]]:
        if facts.right is not None or "seq_len_q" in facts.ports or "mask" in facts.ports:
            raise GraphNotSupportedError("serves plain attention")
        return SETTINGS

    def build_plan(self, graph: pygraph, facts: Any, config: PlanConfig, target: Target) -> Artifact:
        import jax

        ms, wrong = dict(config.knobs)["ms"], dict(config.knobs)["wrong"]
        if ms < 0:
            raise GraphNotSupportedError(f"ms {ms}, serves at least 0")
        shapes = [jax.ShapeDtypeStruct(tensor.dim, tensor.data_type.value) for tensor in graph.outputs]

        def attend(*arrays: Any) -> list[Any]:
            RAN.append(config.name)
            time.sleep(ms / 1000)
            q, k, v = map(np.asarray, arrays)
            weights = np.exp(q @ np.swapaxes(k, -1, -2) * facts.scale)
            total = weights.sum(-1, keepdims=True)
            made = {"O": (1 + wrong) * (weights / total) @ v, "Stats": np.log(total)}
            named = sorted(facts.results, key=facts.results.__getitem__)
            return [made[name].astype(shape.dtype) for name, shape in zip(named, shapes, strict=True)]

        return Inline(lambda q, k, v: tuple(jax.pure_callback(attend, shapes, q, k, v)))


def slow_reference(build_plan: Any) -> Any:
    """A reference engine's `build_plan` whose plans take 10 ms more."""

    def pause(out: Any) -> Any:
        time.sleep(0.01)
        return np.asarray(out)

    def build(*planned: Any) -> Artifact:
        import jax

        made = build_plan(*planned)

        def run(*arrays: Any) -> tuple[Any, ...]:
            out, *rest = made.fn(*arrays)
            return jax.pure_callback(pause, jax.ShapeDtypeStruct(out.shape, out.dtype), out), *rest

        return Inline(run)

    return build


def paced_family(family: Any) -> Any:
    """A family of the manifest with the stand-in in front."""
    return dataclasses.replace(family, slots=(SLOT, *family.slots))
