"""Lowering to cuDNN and planning with it for an H200 that is not there."""

from __future__ import annotations

import base64
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest
from cudnn_graphs import attention, heads, matmul, packed, paged, pointwise
from ffi_programs import buffer, cudnn, payload, seal

from cudnn_jax import _ffi
from cudnn_jax.engines.notes import behavior_note, numerical_note
from cudnn_jax.graph import pygraph
from cudnn_jax.graph.pointwise import POINTWISE
from support.stub_libcuda import (
    CUDNN,
    H200,
    Planner,
    Refused,
    candidates,
    environment,
    planner,
    planning,
    stub_folder,
)

__all__ = ["planner", "stub_folder"]

_keys = itertools.count()
FULL = (2, 4, 512, 512)


def lower(planner: Planner, graph: pygraph) -> str:
    """A key for the lowered graph. What the caller fills is what the graph says, in canonical order."""
    key = f"graph {next(_keys)}"
    uids = planner.ask("lower", key=key, graph=graph.canonical_json(), properties=H200)
    form = graph.canonical()
    assert uids == sorted(index + 1 for index in form["inputs"] + form["outputs"])
    return key


def plan(planner: Planner, graph: pygraph) -> tuple[str, list[Any]]:
    key = lower(planner, graph)
    assert planner.ask("create", key=key, mode="A") >= 1
    return key, planner.ask("plans", key=key)


def decline(planner: Planner, graph: pygraph) -> str:
    with pytest.raises(Refused) as refused:
        plan(planner, graph)
    assert refused.value.kind == "BackendNotSupported"
    assert "\n" not in refused.value.text
    return refused.value.text


@pytest.mark.parametrize("backward", [False, True])
def test_attention_is_planned_built_and_serialised(planner: Planner, backward: bool) -> None:
    graph = attention(backward, b=4, n=16, t=4096, use_causal_mask=True)
    key, plans = plan(planner, graph)
    name, engine, knobs = plans[0]
    assert name.startswith(f"eng{engine}") and engine >= 0
    assert knobs and all(knob == knob.upper() for knob in knobs)

    built = planner.ask("build", key=key, index=0)
    holds = msgpack.unpackb(base64.b64decode(built["plan"]))
    assert holds["cudnn"] == CUDNN and holds["workspace"] == built["workspace"]
    assert json.loads(holds["backend"])["cudnnVersion"] == CUDNN
    # dQ is summed in float32 and the rows' sums are kept: B * N * T * (D + 1) numbers at least.
    assert built["workspace"] >= (4 * 16 * 4096 * 129 * 4 if backward else 0)

    # The same plan from its engine and knobs, from another lowering: byte for byte.
    other = lower(planner, graph)
    assert planner.ask("replay", key=other, engine_id=engine, knobs=knobs) == 0
    assert planner.ask("build", key=other, index=0) == built


def test_the_backward_sums_in_its_own_part_of_the_workspace(planner: Planner) -> None:
    key, _ = plan(planner, attention(True, t=256, n=2))
    holds = msgpack.unpackb(base64.b64decode(planner.ask("build", key=key, index=0)["plan"]))
    rows = 2 * 2 * 256
    # dQ and one number a row, in float32, before the part that is cuDNN's.
    assert holds["backend_workspace"] == rows * 4 * (128 + 1)
    assert sorted(offset for _, offset in holds["scratch"]) == [0, rows * 4 * 128]


@pytest.mark.parametrize("backward", [False, True])
def test_a_serialised_plan_is_read_back(planner: Planner, backward: bool) -> None:
    """By cuDNN, for the same device's properties; and by the program's checks, with the step's own fields."""
    graph = attention(backward, use_causal_mask=True)
    key, ((_, engine, knobs), *_) = plan(planner, graph)
    built = planner.ask("build", key=key, index=0)
    holds = msgpack.unpackb(base64.b64decode(built["plan"]))
    loaded = planner.ask("deserialise", plan=built["plan"], properties=H200)
    assert loaded == built["workspace"] - holds["backend_workspace"]

    form = graph.canonical()
    operands = [form["tensors"][i] for i in form["inputs"] + form["outputs"]]
    buffers = [buffer(operand["data_type"], *operand["dim"]) for operand in operands]
    step = cudnn(
        graph=graph.canonical_json(),
        plan=base64.b64decode(built["plan"]),
        engine_id=engine,
        knobs=knobs,
        uids=[index + 1 for index in form["inputs"] + form["outputs"]],
        args=[["operand", position] for position in range(len(operands))],
        workspace=[0, built["workspace"]],
    )
    count = len(form["inputs"])
    content = payload(buffers[:count], buffers[count:], [step], built["workspace"], "cuda", 90, CUDNN)
    assert _ffi.program_check(seal(content))["steps"] == ["cudnn"]

    step["workspace"] = [0, built["workspace"] - 1]
    with pytest.raises(ValueError, match=r"payload.steps\[0\].workspace: has \d+ bytes, the plan needs"):
        _ffi.program_check(seal(content))
    step |= {"workspace": [0, built["workspace"]], "plan": step["plan"][:-1]}
    with pytest.raises(ValueError, match=r"payload.steps\[0\].plan: not valid MessagePack"):
        _ffi.program_check(seal(content))


SAME_BYTES = [
    attention(use_causal_mask=True),
    attention(bias=(1, 4, 512, 512), t=512),
    attention(t=1, s=512),
    attention(True, lengths=True),
    attention(True, nk=2, use_causal_mask=True),
    attention(True, bias=(2, 4, 512, 512), gradient_of_bias=True),
    matmul(512, 512, 512, bias=True, activation="gelu"),
]


def test_a_plan_has_the_same_bytes_in_every_process(stub_folder: Path) -> None:
    def plans(fill: str) -> list[str]:
        made = []
        # Memory that nobody wrote differs from process to process; this makes it sure to.
        with planning(stub_folder, MALLOC_PERTURB_=fill) as planner:
            for graph in SAME_BYTES:
                key, _ = plan(planner, graph)
                made.append(planner.ask("build", key=key, index=0)["plan"])
        return made

    assert plans("17") == plans("200")


def test_alibi_slopes_travel_with_the_plan(planner: Planner) -> None:
    key, _ = plan(planner, attention(n=8, use_causal_mask=True, use_alibi_mask=True))
    holds = msgpack.unpackb(base64.b64decode(planner.ask("build", key=key, index=0)["plan"]))
    (upload,) = holds["uploads"]
    slopes = memoryview(upload[1]).cast("f").tolist()
    assert slopes == [2.0 ** -(head + 1) for head in range(8)]


def test_a_scalar_keeps_its_value_and_type(planner: Planner) -> None:
    graph = attention(attn_scale=0.3)
    key, _ = plan(planner, graph)
    holds = msgpack.unpackb(base64.b64decode(planner.ask("build", key=key, index=0)["plan"]))
    values = [memoryview(value).cast("f")[0] for _, value in holds["scalars"] if len(value) == 4]
    assert any(abs(value - 0.3) < 1e-7 for value in values)


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"stats": False},
    {"dtype": "float16"},
    {"use_causal_mask": True},
    {"use_causal_mask_bottom_right": True, "t": 256, "s": 512},
    {"nk": 2, "use_causal_mask": True},
    {"nk": 1},
    {"lengths": True},
    {"lengths": True, "use_causal_mask": True},
    {"lengths": True, "use_causal_mask_bottom_right": True, "t": 512, "s": 256},
    {"diagonal_band_left_bound": 3, "t": 2048},
    {"diagonal_band_left_bound": 5, "diagonal_band_right_bound": 3},
    {"sliding_window_length": 5, "use_causal_mask": True},
    {"diagonal_band_left_bound": 5, "diagonal_band_right_bound": 0, "diagonal_alignment": "BOTTOM_RIGHT"},
    {"bias": FULL},
    {"bias": FULL, "use_causal_mask": True},
    {"bias": (1, 4, 512, 512), "bias_dtype": "float32"},
    {"bias": (2, 1, 1, 512)},
    {"bias": (1, 1, 512, 512)},
    {"bias": FULL, "lengths": True},
    {"t": 97},
    {"t": 97, "s": 192},
    {"t": 1, "s": 512},
    *({"d": d} for d in (8, 32, 64, 96, 192, 256)),
    {"d": 192, "dv": 128},
    {"ragged": True},
    {"ragged": True, "nk": 2, "use_causal_mask": True},
    {"sinks": True},
]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("options", ACCEPTED, ids=str)
def test_accepted(planner: Planner, backward: bool, options: dict[str, Any]) -> None:
    plan(planner, attention(backward, **{k: v for k, v in options.items() if not (backward and k == "stats")}))


@pytest.mark.parametrize("options", [{"t": 1}, {"t": 16, "use_causal_mask_bottom_right": True}, {"t": 1, "page": 16}])
def test_paged_attention_is_accepted(planner: Planner, options: dict[str, Any]) -> None:
    plan(planner, paged(**options))


@pytest.mark.parametrize("bias", [FULL, (1, 4, 512, 512), (1, 1, 512, 512), (2, 1, 1, 512), (2, 1, 512, 512)])
def test_the_gradient_of_a_bias_is_accepted(planner: Planner, bias: tuple[int, ...]) -> None:
    plan(planner, attention(True, bias=bias, gradient_of_bias=True))


@pytest.mark.parametrize("options", [{}, {"use_causal_mask": True}, {"bias": FULL, "gradient_of_bias": True}])
def test_the_deterministic_backward_is_accepted(planner: Planner, options: dict[str, Any]) -> None:
    plan(planner, attention(True, use_deterministic_algorithm=True, **options))


DECLINED: list[tuple[bool, dict[str, Any], str]] = [
    (False, {"d": 100}, "hidden_dim should be multiple of 8"),
    (True, {"d": 512}, "hidden_dim should be less than or equal to 256"),
    (False, {"use_causal_mask_bottom_right": True, "s": 256}, "Bottom right causal mask does not support"),
    (True, {"use_causal_mask_bottom_right": True, "s": 256}, "Bottom right causal mask does not support"),
    (False, {"use_causal_mask_bottom_right": True, "bias": FULL}, "Bottom right causal mask is only supported"),
    (True, {"use_causal_mask_bottom_right": True, "bias": FULL}, "Bottom right causal mask is only supported"),
    (True, {"bias": FULL, "bias_dtype": "float32", "gradient_of_bias": True}, "should be fp16/bf16"),
    (True, {"dtype": "float32"}, "Data type for Q tensor should be half / bf16 / e4m3 / e5m2"),
    (True, {"t": 1}, "s_q = s_kv = 1 is not supported"),
    (False, {"mask": (2, 1, 1, 512)}, "isVirtual != true (CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN)"),
    (True, {"mask": (2, 1, 1, 512)}, "CUDNN_STATUS_NOT_SUPPORTED"),
    (False, {"softmax_precision": "bfloat16"}, "SDPA: the cuDNN backend has no softmax_precision"),
    (False, {"stats_use_log2": True}, "SDPA: the cuDNN backend has no stats_use_log2"),
    (True, {"attn_scale_prefolded": True}, "SDPA_BACKWARD: the cuDNN backend has no attn_scale_prefolded"),
]


@pytest.mark.parametrize(("backward", "options", "words"), DECLINED, ids=str)
def test_declined_in_cudnns_words(planner: Planner, backward: bool, options: dict[str, Any], words: str) -> None:
    assert words in decline(planner, attention(backward, **options))


def test_a_port_that_cudnn_lacks_is_named(planner: Planner) -> None:
    graph = pygraph(io_data_type="bfloat16")
    tensors = [graph.tensor((2, 4, 64, 64), (16384, 4096, 64, 1)) for _ in range(5)]
    row = {"dim": (2, 4, 64, 1), "stride": (256, 64, 1, 1), "data_type": "float32"}
    for out in graph.sdpa_backward(*tensors, graph.tensor(**row), dStats=graph.tensor(**row))[:3]:
        out.set_output(True)
    graph.freeze()
    assert decline(planner, graph) == "SDPA_BACKWARD: the cuDNN backend has no dStats"


def test_an_operand_at_two_ports_is_declined(planner: Planner) -> None:
    graph = pygraph(io_data_type="bfloat16")
    x = graph.tensor((2, 4, 64, 64), (16384, 4096, 64, 1))
    graph.sdpa(x, x, x, generate_stats=False)[0].set_output(True)
    graph.freeze()
    assert decline(planner, graph) == "SDPA: the tensor at q is at another port too"


def test_a_sink_that_the_backward_does_not_read_is_declined(planner: Planner) -> None:
    graph = pygraph(io_data_type="bfloat16")
    q, k, v, o, d_o = (heads(graph, 2, 4, 64, 64) for _ in range(5))
    sink, rows = packed(graph, 1, 4, 1, 1, dtype="float32"), packed(graph, 2, 4, 64, 1, dtype="float32")
    for out in graph.sdpa_backward(q, k, v, o, d_o, rows, sink_token=sink)[:3]:
        out.set_output(True)
    graph.freeze()
    at = graph.canonical()["nodes"][0]["inputs"]["sink_token"]
    assert decline(planner, graph) == f"graph.tensors[{at}]: does not reach cuDNN"


@pytest.mark.parametrize("mode", POINTWISE)
def test_every_pointwise_mode_reaches_cudnn(planner: Planner, mode: str) -> None:
    options: dict[str, Any] = {"axis": 2} if mode == "gen_index" else {}
    if mode.startswith("leaky_relu"):
        options["negative_slope"] = 0.1
    if mode.startswith("logical"):
        options["compute_data_type"] = "bool"
    graph = pointwise(mode, [port.name for port in POINTWISE[mode].inputs], **options)
    if mode.startswith("logical"):
        lower(planner, graph)  # cuDNN 9.19 has no engine for a logical node alone
    else:
        plan(planner, graph)


@pytest.mark.parametrize("options", [{}, {"bias": True, "activation": "gelu"}, {"bias": True, "activation": "swish"}])
def test_matmul_with_an_epilogue_is_built(planner: Planner, options: dict[str, Any]) -> None:
    key, _ = plan(planner, matmul(512, 512, 512, **options))
    assert planner.ask("build", key=key, index=0)["plan"]


def test_an_unknown_node_is_named(planner: Planner) -> None:
    form = json.loads(matmul(64, 64, 64).canonical_json())
    form["nodes"][0]["type"] = "GDN"
    with pytest.raises(Refused, match="BackendNotSupported: node type GDN"):
        planner.ask("lower", key="x", graph=json.dumps(form), properties=H200)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"graph": "{"}, "ValueError: graph: not valid JSON"),
    ({"graph": "[]"}, "ValueError: graph: expected a map"),
    ({"graph": '{"version": 2}'}, "ValueError: graph.version: got 2"),
    ({"properties": None}, "ValueError: device, device_properties: the rule is one of the two"),
    ({"device": 0}, "ValueError: device, device_properties: the rule is one of the two"),
    ({"properties": "{}"}, "ValueError: device_properties.deviceVer: expected an integer"),
    ({"properties": None, "device": 0}, "RuntimeError: cuInit failed: CUDA_ERROR_NO_DEVICE, no CUDA-capable device"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=str)
def test_a_bad_argument_is_named(planner: Planner, changes: dict[str, Any], message: str) -> None:
    good = {"key": "x", "graph": matmul(64, 64, 64).canonical_json(), "properties": H200}
    with pytest.raises(Refused, match=re.escape(message)):
        planner.ask("lower", **(good | changes))


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("tensors", 0, "dim"), [1.5], "graph.tensors[0].dim"),
        (("tensors", 0, "data_type"), 1, "graph.tensors[0].data_type"),
        (("tensors", 0, "layout"), "guessed", "graph.tensors[0].layout"),
        (("tensors", 0, "ragged_offset"), 99, "graph.tensors[0].ragged_offset"),
        (("tensors", 0, "value"), "much", "graph.tensors[0].value"),
        (("nodes", 0, "inputs", "A"), -1, "graph.nodes[0].inputs.A"),
        (("nodes", 0, "params"), [], "graph.nodes[0].params"),
        (("inputs",), [99], "graph.inputs"),
    ],
)
def test_a_bad_field_of_the_graph_is_named(planner: Planner, path: tuple[Any, ...], value: object, field: str) -> None:
    form = json.loads(matmul(64, 64, 64).canonical_json())
    inner = form
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises(Refused, match=re.escape(f"ValueError: {field}")):
        planner.ask("lower", key="x", graph=json.dumps(form), properties=H200)


def test_plans_are_asked_for_by_index_and_mode(planner: Planner) -> None:
    key, plans = plan(planner, matmul(64, 64, 64))
    refusals = {
        "create": ({"mode": "C"}, "ValueError: mode: got C"),
        "build": ({"index": len(plans)}, f"ValueError: index: got {len(plans)}, there are {len(plans)} plans"),
        "workspace": ({"index": 0}, "RuntimeError: plan 0 is not built"),
        "replay": ({"engine_id": 0, "knobs": {"SPEED": 1}}, "BackendNotSupported: knob SPEED"),
    }
    for call, (arguments, message) in refusals.items():
        with pytest.raises(Refused, match=re.escape(message)):
            planner.ask(call, key=key, **arguments)
    with pytest.raises(Refused, match="BackendNotSupported: Invalid engine id"):
        planner.ask("replay", key=key, engine_id=1 << 20, knobs={})


def test_a_plan_tells_its_notes(planner: Planner) -> None:
    for graph in (attention(False), matmul(64, 64, 64)):
        key, plans = plan(planner, graph)
        planner.ask("replay", key=key, engine_id=plans[0][1], knobs=plans[0][2])
        found = planner.ask("notes", key=key)
        assert len(found) == len(plans) + 1 and found[-1] == found[0]
        numeric, behavior = (set().union(*kind) for kind in zip(*found, strict=True))
        assert "TENSOR_CORE" in numeric <= set(numerical_note) and behavior <= set(behavior_note)


WITHOUT_CUDNN = """
import json, sys
from cudnn_jax import _ffi
graph, properties, candidates = sys.argv[1:]
_ffi.set_library_candidates({"cudnn": ["/nowhere/libcudnn.so.9"]})
for attempt in (_ffi.cudnn_version, lambda: _ffi.BackendGraph(graph, None, properties)):
    try:
        attempt()
    except _ffi.LibraryNotFound as error:
        assert "libcudnn could not be opened, tried: /nowhere/libcudnn.so.9 (" in str(error), error
    else:
        raise AssertionError("no error")
_ffi.set_library_candidates(json.loads(candidates))
print(_ffi.BackendGraph(graph, None, properties).create_execution_plans("A"))
"""


def test_a_library_that_comes_late_is_used(stub_folder: Path) -> None:
    """No symbol of cuDNN's may have been looked up, and remembered as absent, before libcudnn is open."""
    graph = attention().canonical_json()
    command = [sys.executable, "-c", WITHOUT_CUDNN, graph, H200, json.dumps(candidates())]
    done = subprocess.run(command, env=environment(stub_folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1
