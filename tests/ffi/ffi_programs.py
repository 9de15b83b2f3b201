"""Programs made by hand, to the letter of the layout: what the C++ side must read, whoever built it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

Payload = dict[str, Any]


def buffer(dtype: str, *shape: int) -> Payload:
    return {"dtype": dtype, "shape": list(shape)}


def payload(
    inputs: Sequence[Payload] = (),
    outputs: Sequence[Payload] = (),
    steps: Sequence[Payload] = (),
    workspace: int = 0,
    platform: str = "cpu",
    arch: int | None = None,
    cudnn: int | None = None,
    cutedsl: str | None = None,
) -> Payload:
    return {
        "requires": {"platform": platform, "arch": arch, "cudnn": cudnn, "cutedsl": cutedsl},
        "inputs": list(inputs),
        "outputs": list(outputs),
        "workspace": workspace,
        "steps": list(steps),
    }


def seal(content: Payload, **envelope: Any) -> bytes:
    """The artifact of a payload; `envelope` replaces or adds outer fields."""
    packed = msgpack.packb(content)
    outer = {
        "magic": "cudnn_jax.program",
        "version": 1,
        "sha256": hashlib.sha256(packed).digest(),
        "payload": packed,
    }
    artifact: bytes = msgpack.packb(outer | envelope)
    return artifact


def fill(index: int, value: int, count: int, width: int = 1) -> Payload:
    return {"kind": "fill", "dest": ["operand", index], "value": value, "width": width, "bytes": count}


def host(symbol: str, *args: Sequence[Any]) -> Payload:
    return {"kind": "host", "symbol": symbol, "args": [list(arg) for arg in args]}


def cubin(**fields: Any) -> Payload:
    step = {
        "kind": "cubin",
        "kernel": "axpy",
        "image": b"IMAGE 90 axpy:ppplf\0",
        "grid": [4, 2, 1],
        "args": [["operand", 0], ["operand", 0], ["operand", 1], ["immediate", ["int64", 8]], ["workspace", 0]],
    }
    return step | fields


def cute(**fields: Any) -> Payload:
    step = {
        "kind": "cute",
        "function": "gelu",
        "object": b"OBJECT 4.8.1 gelu:ppi\0",
        "args": [["operand", 0], ["operand", 1], ["immediate", ["int32", -5]]],
    }
    return step | fields


def cudnn(**fields: Any) -> Payload:
    step = {
        "kind": "cudnn",
        "graph": "{}",
        "plan": b"plan",
        "engine_id": 3,
        "pinned": False,
        "knobs": {"CUDNN_KNOB_TYPE_TILE": 1},
        "uids": [1, 2],
        "args": [["operand", 0], ["operand", 1]],
        "workspace": [0, 512],
        "device": None,
    }
    return step | fields


def call(artifact: bytes, results: Any, *operands: Any) -> Any:
    """The custom call that holds `artifact`, for use inside a jitted function."""
    import jax

    attribute = np.frombuffer(artifact, np.uint8)
    return jax.ffi.ffi_call("cudnn_jax.program", results)(*operands, program=attribute)
