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
