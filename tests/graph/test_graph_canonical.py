"""The canonical form: its text, its order, and what it does and does not depend on."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from graph_samples import NK, B, N, S, T, backward_ports, masked_attention, qkv
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_jax.graph import pygraph


def test_the_text_of_a_small_graph() -> None:
    graph = pygraph("named", io_data_type="bfloat16")
    x = graph.tensor((2, 3), (1, 2), name="x", uid=9)
    graph.mul(x, graph.scalar(2, "float32", rank=2), name="twice").set_output(True).set_name("y")
    user, scalar = {"layout": "user", "ragged_offset": None, "virtual": False}, {"value": 2.0, "data_type": "float32"}
    assert graph.canonical() == {
        "version": 1,
        "io_data_type": "bfloat16",
        "intermediate_data_type": "float32",
        "compute_data_type": "float32",
        "tensors": [
            {"dim": [2, 3], "stride": [1, 2], "data_type": "bfloat16", "value": None} | user,
            {"dim": [1, 1], "stride": [1, 1]} | scalar | user,
            {"dim": [2, 3], "stride": [3, 1], "data_type": "bfloat16", "value": None} | user | {"layout": "inferred"},
        ],
        "nodes": [
            {
                "type": "POINTWISE",
                "inputs": {"a": 0, "b": 1},
                "outputs": {"OUT_0": 2},
                "params": {"mode": "mul"},
                "compute_data_type": None,
            }
        ],
        "inputs": [0],
        "outputs": [2],
    }
    text = graph.canonical_json()
    assert text == json.dumps(graph.canonical(), sort_keys=True, separators=(",", ":"))
    assert graph.hash() == hashlib.sha256(text.encode()).hexdigest()
    graph.freeze()
    assert graph.canonical_json() == text


def test_masked_attention_is_written_as_the_lowering_reads_it() -> None:
    form = masked_attention().canonical()
    select, attend = form["nodes"]
    assert select["params"] == {"mode": "binary_select"}
    assert attend["params"] == {"attn_scale": 0.125, "generate_stats": True}
    assert attend["inputs"] == {"q": 4, "k": 5, "v": 6, "bias": select["outputs"]["OUT_0"]}
    assert attend["outputs"] == {"O": 7, "Stats": 8}
    zero, hidden, mask, bias = form["tensors"][:4]
    assert (zero["value"], hidden["value"], mask["value"]) == (0.0, "-inf", None)
    assert bias["virtual"] and bias["dim"] == [B, 1, 1, S]
    assert form["inputs"] == [2, 4, 5, 6] and form["outputs"] == [7, 8]
    assert json.loads(masked_attention().canonical_json()) == form


def test_inputs_and_outputs_are_the_tensors_of_the_canonical_indices() -> None:
    graph = masked_attention()
    names = [tensor.name for tensor in graph.inputs]
    assert names == ["mask", "q", "k", "v"]
    assert [tensor.producer.type for tensor in graph.outputs] == ["SDPA", "SDPA"]


def test_ports_follow_the_table_not_the_call() -> None:
    first, second = (pygraph(io_data_type="bfloat16") for _ in range(2))
    first.sdpa(**qkv(first))[0].set_output(True)
    ports = dict(reversed(qkv(second).items()))
    second.sdpa(**ports)[0].set_output(True)
    assert first.canonical_json() == second.canonical_json()
    assert [tensor.name for tensor in second.inputs] == ["q", "k", "v"]


names = st.text(max_size=8)


@settings(deadline=None)
@given(names, names, st.lists(names, min_size=9, max_size=9), st.permutations(range(100, 109)))
def test_names_and_uids_do_not_matter(graph_name, node_name, tensor_names, uids) -> None:
    graph = masked_attention(name=node_name)
    graph.name = graph_name
    for tensor, name, uid in zip(graph.tensors, tensor_names, uids, strict=True):
        tensor.set_name(name).set_uid(uid)
    assert graph.canonical_json() == masked_attention().canonical_json()


def test_unused_tensors_do_not_matter() -> None:
    graph = masked_attention()
    graph.tensor((3, 3))
    assert graph.hash() == masked_attention().hash()


@pytest.mark.parametrize(
    "options",
    [
        {"use_causal_mask": False, "use_alibi_mask": False, "unfuse_fma": 0},
        {"diagonal_alignment": "top_left", "implementation": "AUTO", "dropout": None},
        {"is_inference": False},
    ],
)
def test_a_default_said_aloud_does_not_matter(options) -> None:
    assert masked_attention(**options).hash() == masked_attention().hash()


def change_dim(graph: pygraph) -> None:
    graph.tensors[0].set_dim((B, 2 * N, T, 32)).set_stride((2 * N * T * 32, 32, 2 * N * 32, 1))


@pytest.mark.parametrize(
    "change",
    [
        change_dim,
        lambda graph: graph.tensors[0].set_stride((N * T * 32, T * 32, 32, 1)),
        lambda graph: graph.tensors[1].set_data_type("float16"),
        lambda graph: setattr(graph, "io_data_type", "float16"),
        lambda graph: setattr(graph, "intermediate_data_type", "bfloat16"),
        lambda graph: setattr(graph, "compute_data_type", "bfloat16"),
        lambda graph: setattr(graph.tensors[4], "value", 1.0),
        lambda graph: graph.outputs[1].set_output(False),
        lambda graph: graph.outputs[0].set_stride(graph.outputs[0].stride),
        lambda graph: graph.exp(graph.outputs[0]),
        lambda graph: graph.tensors[0].set_ragged_offset(graph.tensor((B + 1, 1, 1, 1), data_type="int32")),
    ],
)
def test_every_part_of_the_meaning_matters(change) -> None:
    graph = masked_attention()
    change(graph)
    assert graph.hash() != masked_attention().hash()


@pytest.mark.parametrize(
    "options", [{"use_causal_mask": True}, {"diagonal_band_right_bound": 0}, {"compute_data_type": "bfloat16"}]
)
def test_every_option_matters(options) -> None:
    assert masked_attention(**options).hash() != masked_attention().hash()


def test_a_layout_that_the_user_set_is_kept_and_marked() -> None:
    graph = masked_attention()
    out = graph.outputs[0]
    assert not out.layout_is_user and graph.tensors[0].layout_is_user
    rows = (N * T * 24, T * 24, 24, 1)
    out.set_stride(rows)
    assert out.layout_is_user and out.stride == rows
    index = graph.canonical()["outputs"][0]
    assert graph.canonical()["tensors"][index]["layout"] == "user"
    assert graph.canonical()["tensors"][index]["stride"] == list(rows)
    graph.freeze()
    assert out.stride == rows


@pytest.mark.parametrize(
    ("value", "kind", "written"),
    [
        (math.inf, "float32", "inf"),
        (-math.inf, "bfloat16", "-inf"),
        (math.nan, "float16", "nan"),
        (1, "float32", 1.0),
        (3.0, "int32", 3),
        (1, "bool", True),
    ],
)
def test_numbers_are_written_by_their_type(value, kind, written) -> None:
    graph = pygraph(io_data_type="float32")
    graph.mul(graph.tensor((2,)), graph.scalar(value, kind)).set_output(True)
    found = graph.canonical()["tensors"][1]["value"]
    assert found == written and type(found) is type(written)
    json.loads(graph.canonical_json(), parse_constant=pytest.fail)


def test_one_tensor_in_two_ports_is_one_operand() -> None:
    graph = pygraph(io_data_type="float32")
    x = graph.tensor((B, NK, T, T))
    graph.sdpa(x, x, x)[0].set_output(True)
    assert graph.inputs == [x]
    assert graph.canonical()["nodes"][0]["inputs"] == {"q": 0, "k": 0, "v": 0}


def test_a_ragged_offset_is_an_operand_behind_its_tensor() -> None:
    graph = pygraph(io_data_type="float16")
    ports = qkv(graph)
    ragged = graph.tensor((B + 1, 1, 1, 1), data_type="int32", name="ragged")
    ports["q"].ragged_offset = ragged
    out, _ = graph.sdpa(**ports)
    out.set_output(True).set_ragged_offset(ragged)
    assert [tensor.name for tensor in graph.inputs] == ["q", "ragged", "k", "v"]
    form = graph.canonical()
    assert [tensor["ragged_offset"] for tensor in form["tensors"]] == [1, None, None, None, 1]
    assert form["inputs"] == [0, 1, 2, 3] and form["outputs"] == [4]


BUILD = """
from graph_samples import masked_attention
graph = masked_attention(use_causal_mask=True)
print(graph.hash(), [tensor.name for tensor in graph.inputs])
"""


def test_every_process_writes_the_same() -> None:
    answers = set()
    for seed in ("0", "1", "4294967295"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", BUILD],
            env=environment,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        answers.add(done.stdout)
    assert answers == {f"{masked_attention(use_causal_mask=True).hash()} ['mask', 'q', 'k', 'v']\n"}


def test_the_backward_in_canonical_order() -> None:
    graph = pygraph(io_data_type="bfloat16")
    bias, gradient = graph.tensor((1, N, T, S), name="bias"), graph.tensor((1, N, T, S), name="dBias")
    cotangent = graph.tensor((B, N, T, 1), data_type="float32", name="dStats")
    made = graph.sdpa_backward(dStats=cotangent, dBias=gradient, bias=bias, **backward_ports(graph))
    for tensor in made:
        tensor.set_output(True)
    assert [t.name for t in graph.inputs] == ["q", "k", "v", "o", "dO", "stats", "bias", "dStats"]
    (node,) = graph.canonical()["nodes"]
    assert node["outputs"] == {"dQ": 8, "dK": 9, "dV": 10, "dBias": 11}
    assert graph.canonical()["tensors"][11]["layout"] == "user"


def test_dims_alone_can_be_the_users() -> None:
    """Of an output, the strides stay open to the backend then."""
    graph = pygraph(io_data_type="float32")
    x = graph.tensor((2, 3))
    y = graph.exp(graph.reduction(x, mode="ADD").set_dim((2, 1))).set_output(True)
    layouts = [tensor["layout"] for tensor in graph.canonical()["tensors"]]
    assert layouts == ["user", "dims", "inferred"]
    y.set_stride(y.stride)
    assert graph.canonical()["tensors"][2]["layout"] == "user"
