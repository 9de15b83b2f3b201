"""What people see of a graph."""

from __future__ import annotations

from graph_samples import masked_attention

from cudnn_jax.graph import pygraph


def test_a_graph_is_one_line_a_node() -> None:
    graph = masked_attention(name="attend")
    graph.name = "demo"
    assert repr(graph).splitlines() == [
        "pygraph 'demo' (open; io bfloat16, intermediate float32, compute float32)",
        "  in   %mask:bool[2, 1, 1, 16]",
        "  in   %q:bfloat16[2, 4, 8, 32]",
        "  in   %k:bfloat16[2, 2, 16, 32]",
        "  in   %v:bfloat16[2, 2, 16, 24]",
        "  OUT_0=%7:float32[2, 1, 1, 16] = binary_select(input0=0.0:float32, input1=-inf:float32, mask=%mask)",
        "  O=%attend::O:bfloat16[2, 4, 8, 24], Stats=%attend::Stats:float32[2, 4, 8, 1] = "
        "sdpa(q=%q, k=%k, v=%v, bias=%7, attn_scale=0.125, generate_stats=True)  # attend",
        "  out  %attend::O:bfloat16[2, 4, 8, 24]",
        "  out  %attend::Stats:float32[2, 4, 8, 1]",
    ]
    graph.freeze()
    assert repr(graph).startswith("pygraph 'demo' (frozen;")
    assert repr(graph.nodes[0]) == repr(graph).splitlines()[5].strip()


def test_a_tensor_says_what_it_is() -> None:
    graph = pygraph(io_data_type="float16")
    x = graph.tensor((2, 3), name="x")
    y = graph.exp(x, compute_data_type="float32", name="e")
    assert repr(x) == "<Tensor %x:float16[2, 3] uid=1 stride=[3, 1]>"
    assert repr(y) == "<Tensor %e::OUT_0:float32[2, 3] uid=2 stride=[3, 1], virtual, made by exp 'e'>"
    assert repr(graph.scalar(2, "int32")) == "<Tensor 2:int32 uid=3 stride=[1, 1, 1, 1], by value>"
    assert "compute=float32" in repr(graph.nodes[0])


def test_an_empty_graph_and_an_unset_type_can_be_shown() -> None:
    graph = pygraph()
    assert repr(graph) == "pygraph '' (open; io not_set, intermediate float32, compute float32)"
    assert repr(graph.tensor((1,))) == "<Tensor %1:not_set[1] uid=1 stride=[1]>"


def layer() -> pygraph:
    graph = pygraph("layer", io_data_type="float16")
    x, w, bias = (graph.tensor(dim, name=name) for dim, name in (((2, 3), "x"), ((3, 4), "w"), ((1, 4), "b")))
    y = graph.matmul(x, w, name="mm")
    z = graph.add(y, bias)
    graph.mul(graph.relu(z, negative_slope=0.5), graph.scalar(2.0, "float32", rank=2)).set_output(True)
    graph.exp(x).set_output(True).set_name("e")
    return graph


def test_a_graph_is_drawn_with_a_column_for_each_tensor() -> None:
    assert layer().draw().splitlines() == [
        "o      %x:float16[2, 3]",
        "| o    %w:float16[3, 4]",
        "*-*    matmul 'mm'",
        "| o    %mm::C:float32[2, 4]",
        "| | o  %b:float16[1, 4]",
        "| *-*  add",
        "| o    %5:float32[2, 4]",
        "| *    relu",
        "| o    %6:float32[2, 4]",
        "| *    mul(b=2.0:float32)",
        "| o    %8:float16[2, 4]  =>",
        "*      exp",
        "o      %e:float16[2, 3]  =>",
    ]


def test_a_line_between_operands_crosses_what_it_passes() -> None:
    graph = pygraph(io_data_type="float16")
    a, b, c = (graph.tensor((2,), name=name) for name in "abc")
    graph.add(a, b).set_output(True)
    graph.add(a, c).set_output(True)
    graph.exp(b).set_output(True)
    marks = [line[:5].rstrip() for line in graph.draw().splitlines()]
    assert marks == ["o", "| o", "*-*", "| | o", "| | o", "*-|-*", "o |", "  *", "o"]


def test_a_graph_is_graphviz_text() -> None:
    graph = layer()
    graph.tensors[0].name = 'x "quoted"'
    lines = graph.to_dot().splitlines()
    assert lines[0] == 'digraph "layer" {' and lines[-1] == "}"
    assert "  n0 [label=\"matmul 'mm'\"];" in lines
    assert '  t1 -> n0 [label="A"];' in lines
    assert '  n0 -> n1 [label="a: %mm::C:float32[2, 4]"];' in lines
    assert '  t1 [shape=ellipse, label="%x \\"quoted\\":float16[2, 3]"];' in lines
    assert sum("ellipse" in line for line in lines) == 5
    assert sum("->" in line for line in lines) == 9


def test_names_stay_on_their_lines() -> None:
    name = "a\n\x1b[31m\u2028é"
    graph = pygraph(name, io_data_type="float16")
    x = graph.tensor((2,), name=name)
    y = graph.exp(x, name=name).set_output(True).set_name(name)
    shown = {"repr": repr(graph), "draw": graph.draw(), "dot": graph.to_dot()}
    shown |= {"tensor": repr(x), "node": repr(y.producer)}
    lines = {what: len(text.splitlines()) for what, text in shown.items()}
    assert lines == {"repr": 4, "draw": 3, "dot": 8, "tensor": 1, "node": 1}
    for what, text in shown.items():
        assert r"a\n\x1b[31m\u2028é".replace("\\", "\\\\" if what == "dot" else "\\") in text, what
        assert text.replace("\n", "").isprintable(), what
    assert x.name == graph.inspect()["name"] == name and pygraph.from_json(graph.to_json()).name == name


def test_a_graph_can_be_inspected_open_frozen_and_broken() -> None:
    graph = layer()
    seen = graph.inspect()
    assert [node["operation"] for node in seen["nodes"]] == ["matmul", "add", "relu", "mul", "exp"]
    assert seen["inputs"] == [1, 2, 3] and seen["outputs"] == [8, 9] and not seen["frozen"]
    assert seen["nodes"][2]["params"]["negative_slope"] == 0.5
    assert {seen["tensors"][uid]["role"] for uid in (4, 5, 6)} == {"virtual"}
    assert [seen["tensors"][uid]["role"] for uid in (1, 7, 8)] == ["input", "number", "output"]
    assert seen["tensors"][4]["made_by"] == "matmul 'mm'" and seen["tensors"][4]["dim"] == (2, 4)
    graph.freeze()
    assert graph.inspect() == seen | {"frozen": True}
    broken = layer()
    broken.tensors[0].set_dim((5, 5))
    assert broken.inspect()["tensors"][1]["dim"] == (5, 5)
