"""Plans graphs for its parent: a JSON object a line in, an answer a line out."""

from __future__ import annotations

import base64
import ctypes
import json
import sys
from typing import Any

import msgpack

from cudnn_jax import _ffi

graphs: dict[str, Any] = {}


def lower(key: str, graph: str, properties: str | None, device: int | None = None) -> list[int]:
    graphs[key] = _ffi.BackendGraph(graph, device, properties)
    return graphs[key].uids()


def layouts(key: str) -> dict[int, Any]:
    return graphs[key].layouts()


def create(key: str, mode: str) -> int:
    return graphs[key].create_execution_plans(mode)


def replay(key: str, engine_id: int, knobs: dict[str, int]) -> int:
    return graphs[key].create_execution_plan(engine_id, knobs)


def plans(key: str) -> list[Any]:
    lowered = graphs[key]
    return [(lowered.plan_name(i), *lowered.plan_engine(i)) for i in range(lowered.plan_count())]


def notes(key: str) -> list[Any]:
    return [graphs[key].plan_notes(i) for i in range(graphs[key].plan_count())]


def build(key: str, index: int) -> dict[str, Any]:
    graphs[key].build_plan(index)
    plan = base64.b64encode(graphs[key].serialize_plan(index)).decode()
    return {"workspace": graphs[key].plan_workspace(index), "plan": plan}


def workspace(key: str, index: int) -> int:
    return graphs[key].plan_workspace(index)


def deserialise(plan: str, properties: str) -> int:
    """cuDNN's own bytes for its part of the workspace, of a plan that it reads back without a device."""
    api = ctypes.CDLL("libcudnn.so.9")  # loaded already
    # From cudnn_graph.h.
    execution_plan, device_properties = 5, 38
    plan_workspace, plan_text, plan_device, device_text = 402, 405, 407, 2702
    of_int64, of_descriptor, of_char = 3, 15, 24

    def descriptor(kind: int, *attributes: tuple[int, int, int, Any]) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        check(api.cudnnBackendCreateDescriptor(kind, ctypes.byref(made)))
        for name, what, count, values in attributes:
            check(api.cudnnBackendSetAttribute(made, name, what, ctypes.c_int64(count), values))
        check(api.cudnnBackendFinalize(made))
        return made

    def check(status: int) -> None:
        assert status == 0, f"cuDNN answers {status}"

    text = msgpack.unpackb(base64.b64decode(plan))["backend"]
    device = descriptor(device_properties, (device_text, of_char, len(properties), properties.encode()))
    made = descriptor(
        execution_plan,
        (plan_text, of_char, len(text), text),
        (plan_device, of_descriptor, 1, ctypes.byref(device)),
    )
    count, size = ctypes.c_int64(), ctypes.c_int64()
    one = ctypes.c_int64(1)
    check(api.cudnnBackendGetAttribute(made, plan_workspace, of_int64, one, ctypes.byref(count), ctypes.byref(size)))
    return size.value


CALLS = {call.__name__: call for call in (lower, layouts, create, replay, plans, notes, build, workspace, deserialise)}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": CALLS[request.pop("call")](**request)}
    except Exception as error:
        return {"refused": (type(error).__name__, str(error))}


_ffi.set_library_candidates(json.loads(sys.argv[1]))
for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
