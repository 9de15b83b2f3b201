"""Plans graphs for its parent: a JSON object a line in, an answer a line out."""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

from cudnn_jax import _ffi

graphs: dict[str, Any] = {}


def lower(key: str, graph: str, properties: str | None, device: int | None = None) -> list[int]:
    graphs[key] = _ffi.BackendGraph(graph, device, properties)
    return graphs[key].uids()


def create(key: str, mode: str) -> int:
    return graphs[key].create_execution_plans(mode)


def replay(key: str, engine_id: int, knobs: dict[str, int]) -> int:
    return graphs[key].create_execution_plan(engine_id, knobs)


def plans(key: str) -> list[Any]:
    lowered = graphs[key]
    return [(lowered.plan_name(i), *lowered.plan_engine(i)) for i in range(lowered.plan_count())]


def build(key: str, index: int) -> dict[str, Any]:
    graphs[key].build_plan(index)
    plan = base64.b64encode(graphs[key].serialize_plan(index)).decode()
    return {"workspace": graphs[key].plan_workspace(index), "plan": plan}


def workspace(key: str, index: int) -> int:
    return graphs[key].plan_workspace(index)


def version() -> int:
    return _ffi.cudnn_version()


CALLS = {call.__name__: call for call in (lower, create, replay, plans, build, workspace, version)}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": CALLS[request.pop("call")](**request)}
    except Exception as error:
        return {"refused": (type(error).__name__, str(error))}


_ffi.set_library_candidates(json.loads(sys.argv[1]))
for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
