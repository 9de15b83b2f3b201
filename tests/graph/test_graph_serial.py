"""JSON text: what is written comes back, whatever the graph, and what is no graph is refused with its place."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import random_graphs
from graph_samples import B, backward_ports, masked_attention, qkv
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_jax.graph import GraphFrozenError, GraphValidationError, pygraph


def attention_backward() -> pygraph:
    """Outputs of the caller, expanded keywords, ports without a keyword, ragged offsets, a uid of the user."""
    graph = pygraph("backward", io_data_type="bfloat16")
    ports = backward_ports(graph)
    bias = graph.tensor((1, 4, 8, 16), name="bias")
    ports["q"].set_ragged_offset(graph.tensor((B + 1, 1, 1, 1), data_type="int32"))
    seed, offset = (graph.tensor((1, 1, 1, 1), data_type="int64", uid=uid) for uid in (77, 1))
    made = graph.sdpa_backward(
        **ports, bias=bias, dBias=graph.tensor((1, 4, 8, 16)), dropout=(0.25, seed, offset), name="attend"
    )
    for tensor in made:
        tensor.set_output(True)
    graph.nodes[0].outputs["dBias"].set_output(True)
    return graph


def convolution() -> pygraph:
    """Lists, dims that the caller sets, many ports, numbers, a type and a stride of the user."""
    graph = pygraph(io_data_type="float16", intermediate_data_type="bfloat16")
    image = graph.tensor((2, 4, 6, 6), (144, 1, 24, 4))
    y = graph.conv_fprop(image, graph.tensor((4, 4, 3, 3)), padding=(1, 1), stride=[2, 2], compute_data_type="float64")
    scaled = graph.mul(y, graph.scalar(-math.inf, "float32"), name="scaled").set_data_type("float32")
    folded = graph.reduction(scaled, mode="NORM2").set_dim((2, 1, 1, 1)).set_stride((1, 1, 1, 1))
    part = graph.slice(folded, [(0, 1), (0, 1)]).set_output(True)
    graph.concatenate([part, part, part], 0, in_place_index=0).set_output(True)
    graph.leaky_relu(y, math.inf).set_output(True)
    return graph


@pytest.mark.parametrize("make", [masked_attention, attention_backward, convolution])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_written_comes_back(make, frozen) -> None:
    graph = make()
    if frozen:
        graph.freeze()
    text = graph.to_json()
    json.loads(text, parse_constant=pytest.fail)
    back = pygraph.from_json(text)
    assert not back.frozen
    assert back.to_json() == text
    assert back.canonical_json() == graph.canonical_json()
    assert repr(back).replace("open", "frozen" if frozen else "open") == repr(graph)
    assert [tensor.uid for tensor in back.tensors] == [tensor.uid for tensor in graph.tensors]
    back.freeze()
    with pytest.raises(GraphFrozenError):
        back.tensors[0].set_dim((1,))


def test_what_came_back_can_be_built_on() -> None:
    graph = pygraph.from_json(attention_backward().to_json())
    assert graph.tensor((2,), uid=4).uid == 4, "an automatic uid moves"
    with pytest.raises(GraphValidationError, match="uid 77 is taken"):
        graph.tensor((2,), uid=77)
    graph.neg(graph.outputs[0], name="more").set_output(True)
    graph.freeze()


def test_what_is_inferred_is_inferred_again() -> None:
    graph = pygraph(io_data_type="float32")
    y = graph.exp(graph.tensor((2, 3))).set_output(True)
    back = pygraph.from_json(graph.to_json())
    back.tensors[0].set_dim((4, 5))
    assert back.outputs[0].dim == (4, 5) and y.dim == (2, 3)
    assert not back.outputs[0].layout_is_user


names = st.text(max_size=5)


@settings(deadline=None, max_examples=60)
@given(random_graphs.recipes, names, st.randoms(use_true_random=False))
def test_random_graphs_are_what_they_compute(recipe, name, random) -> None:
    """The canonical form survives renaming, other uids, building again and JSON."""
    graph, other = pygraph(io_data_type="float32"), pygraph(name, io_data_type="float32")
    random_graphs.build(recipe, graph)
    random_graphs.build(recipe, other, names=name)
    for tensor, uid in zip(other.tensors, random.sample(range(50), len(other.tensors)), strict=True):
        tensor.set_uid(uid)
    assert other.canonical_json() == graph.canonical_json()
    back = pygraph.from_json(other.to_json())
    assert back.to_json() == other.to_json()
    assert back.canonical_json() == graph.canonical_json()


def changed(change: Any) -> str:
    form = json.loads(convolution().to_json())
    change(form)
    return json.dumps(form)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "graph text is no JSON"),
        ("[]", "graph text has version 'list'; the rule: 1"),
        (changed(lambda form: form.update(version=2)), "graph text has version 2; the rule: 1, as to_json writes it"),
        (changed(lambda form: form.pop("tensors")), "graph text: KeyError: 'tensors'"),
        (changed(lambda form: form["tensors"][0].update(dim=[-1])), r"tensors\[0\]: tensor #1: dim is \[-1\]"),
        (changed(lambda form: form["tensors"][0].pop("stride")), r"tensors\[0\]: KeyError: 'stride'"),
        (changed(lambda form: form["tensors"][0].update(uid=2)), r"tensors: .*uid 2 is taken"),
        (changed(lambda form: form["nodes"][0].update(operation="conv")), r"nodes\[0\]: operation is 'conv'; the rule"),
        (changed(lambda form: form["nodes"][0]["inputs"].pop("weight")), r"nodes\[0\]: conv_fprop: weight is missing"),
        (
            changed(lambda form: form["nodes"][0]["inputs"].update(more=1)),
            r"nodes\[0\]: conv_fprop: more is unknown; the rule: one of",
        ),
        (changed(lambda form: form["nodes"][0]["inputs"].update(weight=99)), r"nodes\[0\]: KeyError: 99"),
        (
            changed(lambda form: form["nodes"][0]["params"].update(size=1)),
            r"conv_fprop: size is unknown; the rule: one of",
        ),
        (
            changed(lambda form: form["nodes"][0]["params"].update(stride=1)),
            r"conv_fprop: stride is 1; the rule: a sequence",
        ),
        (changed(lambda form: form.update(name=7)), "graph text: graph: name is 7; the rule: a string"),
        (changed(lambda form: form["nodes"][0].update(name=[])), r"nodes\[0\]: conv_fprop: name is \[\]; the rule"),
        (changed(lambda form: form["tensors"][0].update(value="one")), r"tensors\[0\]: ValueError: could not convert"),
        ("[" * 100_000, "graph text is no JSON: maximum recursion depth"),
        (None, "graph text is no JSON: the JSON object must be str"),
        (changed(lambda form: form["nodes"][0]["outputs"].clear()), r"nodes\[0\]: outputs are none; the rule: Y"),
    ],
)
def test_what_is_no_graph_is_refused_with_its_place(text, message) -> None:
    with pytest.raises(GraphValidationError, match=message):
        pygraph.from_json(text)


def test_every_process_writes_the_same() -> None:
    code = "from test_graph_serial import convolution; print(convolution().to_json())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "5"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == convolution().to_json()


TEXTS = {
    convolution: "393b60cd2838536d",
    attention_backward: "94b38d103338e2e5",
    masked_attention: "c6b7987276ca8c80",
}
"""The beginning of the text's sha256. Another text is another `serial.VERSION`."""


@pytest.mark.parametrize("make", TEXTS)
def test_every_python_writes_the_same(make) -> None:
    assert hashlib.sha256(make().to_json().encode()).hexdigest().startswith(TEXTS[make])


def test_a_subclass_comes_back_as_itself() -> None:
    class Mine(pygraph):
        pass

    graph = Mine(io_data_type="float32")
    graph.sdpa(**qkv(graph))[0].set_output(True)
    assert type(Mine.from_json(graph.to_json())) is Mine


COPIES = {
    "pickle": lambda held: pickle.loads(pickle.dumps(held)),
    "deepcopy": copy.deepcopy,
    "copy": lambda held: [copy.copy(held[0])],
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_copy_is_another_graph_with_the_same_names_and_uids(way, frozen) -> None:
    graph = attention_backward()
    if frozen:
        graph.freeze()
    other, *parts = COPIES[way]([graph, *graph.tensors, *graph.nodes])
    assert type(other) is pygraph and not other.frozen and other.to_json() == graph.to_json()
    assert [tensor.uid for tensor in other.tensors] == [tensor.uid for tensor in graph.tensors]
    assert parts in ([], [*other.tensors, *other.nodes])
    other.tensor((2,), name="more")
    assert len(graph.tensors) == len(other.tensors) - 1


def test_a_tensor_is_unpickled_with_its_graph() -> None:
    bias = pickle.loads(pickle.dumps(attention_backward().tensor_of_uid(77)))
    assert bias.uid == 77 and bias._graph.to_json() == attention_backward().to_json()
