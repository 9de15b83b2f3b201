"""Each operation lowered to cuDNN for an H200 that is not there: a plan builds, or cuDNN's own words say why not.

Attention's plans are listed and not built here: tests/ffi builds some, and each takes half a second.
`tests/gpu/operation_declines.json` holds these words.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cudnn_jax import _ffi
from support import operations, stub_libcuda
from support.stub_libcuda import stub_folder as stub_folder

DECLINES = json.loads((Path(__file__).parents[1] / "gpu" / "operation_declines.json").read_text())
NAMED = r"(cuDNN|CUDNN) (v|version >= )?9\.\d+|Blackwell"
"""The version or the architecture that a refusal asks for."""
ALONE = {"concatenate", "matmul gradients", "matmul chain"}
"""cuDNN has the nodes, and no engine: for concatenate not in 9.19 and 9.27 on sm_90 and sm_100, nor in 9.28 on sm_90."""

CHILD = """
import contextlib, json
from cudnn_jax.engines.target import named
from cudnn_jax.graph import GraphNotSupportedError
from support import operations
told = {}
for name in operations.ALL:
    graph = operations.graph_of(name)
    with contextlib.suppress(GraphNotSupportedError):
        graph.create_execution_plans(target=named("h200"))
    ours = [at for at, plan in enumerate(graph.plans) if plan.engine == "cudnn"]
    if ours and name not in operations.ATTENTION:
        graph.build_plan_at_index(ours[0])
    elif not ours:
        told[name] = next(decline.reason for decline in graph.declines if decline.engine == "cudnn")
print(json.dumps(told))
"""


def test_each_operation_has_a_plan_or_a_reason(stub_folder: Path) -> None:
    told = stub_libcuda.told_by(CHILD, stub_folder, timeout=300, CUDNN_JAX_CUDNN_UNPROVEN="1")
    assert told == DECLINES


@pytest.mark.parametrize("name", [name for name in DECLINES if name not in operations.ATTENTION])
def test_a_refusal_names_the_version_or_the_architecture(name: str) -> None:
    assert (re.search(NAMED, DECLINES[name]) is None) == (name in ALONE), DECLINES[name]


def test_every_lowered_node_type_has_a_graph_here() -> None:
    shown = {node.type for name in operations.GRAPHS | operations.FLOAT8 for node in operations.graph_of(name).nodes}
    # Those are planned in many more ways in tests/ffi.
    assert shown | {"POINTWISE", "SDPA", "SDPA_BACKWARD"} == set(_ffi.lowered_node_types())
