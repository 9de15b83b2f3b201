"""What a plan is built for."""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import dataclass

from cudnn_jax import _ffi


@dataclass(frozen=True)
class Target:
    """A platform and, for "cuda", the device that will run the plan.

    Attributes:
      platform: XLA's name of it, "cpu" or "cuda" (others are served by the reference engine alone).
      device_kind: the device's name, such as "NVIDIA H200"; part of every cache key.
      sm: compute capability as major * 10 + minor, None off CUDA.
      sm_count: number of multiprocessors, None off CUDA.
      ordinal: the local CUDA ordinal to ask, None for a GPU that is not there.
      properties: cuDNN's device properties as JSON text, for a GPU that is not there.
    """

    platform: str
    device_kind: str = ""
    sm: int | None = None
    sm_count: int | None = None
    ordinal: int | None = None
    properties: str | None = None

    def describe(self) -> str:
        if self.platform != "cuda":
            return self.platform
        where = "" if self.ordinal is not None else ", ahead of time"
        return f"{self.device_kind} (sm_{self.sm}{where})"


CPU = Target("cpu", device_kind="cpu")


def local(ordinal: int) -> Target:
    """The target of a CUDA device that is here.

    Raises:
      ValueError: there is no device of that ordinal.
    """
    info = _ffi.device_info(ordinal)
    return Target("cuda", device_kind=info.name, sm=info.sm, sm_count=info.sm_count, ordinal=ordinal)


def known_devices() -> list[str]:
    """Names that `named` accepts."""
    folder = importlib.resources.files("cudnn_jax.engines") / "devices"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def named(name: str) -> Target:
    """The target of a GPU that need not be here, by its short name such as "h200"."""
    if name not in known_devices():
        raise ValueError(f"target={name!r} is not known; known targets: {', '.join(known_devices())}")
    text = (importlib.resources.files("cudnn_jax.engines") / "devices" / f"{name}.json").read_text()
    facts = json.loads(text)
    return Target(
        platform="cuda",
        device_kind=facts["deviceName"],
        sm=facts["deviceVer"] // 10,
        sm_count=facts["multiProcessorCount"],
        properties=text,
    )
