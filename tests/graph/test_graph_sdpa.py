"""Attention nodes: what is inferred, which outputs exist, and what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from graph_samples import DV, NK, B, D, N, S, T, backward_ports, heads, lengths, qkv

from cudnn_jax.graph import OPERATIONS, GraphNotSupportedError, GraphValidationError, data_type, pygraph


@pytest.fixture
def graph() -> pygraph:
    return pygraph(io_data_type="bfloat16")


def test_the_output_takes_the_memory_order_of_q(graph) -> None:
    out, _ = graph.sdpa(**qkv(graph))
    assert (out.dim, out.stride) == ((B, N, T, DV), (T * N * DV, DV, N * DV, 1))
    rows = {"q": (B, N, T, D), "k": (B, NK, S, D), "v": (B, NK, S, DV)}
    out, _ = graph.sdpa(**{name: graph.tensor(dim) for name, dim in rows.items()})
    assert (out.dim, out.stride) == ((B, N, T, DV), (N * T * DV, T * DV, DV, 1))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_memory_order_of_q_is_the_outputs(graph, order) -> None:
    def laid_out(dim):
        """Dense strides with the axes of `order` from slowest to fastest."""
        return tuple(math.prod(dim[later] for later in order[order.index(axis) + 1 :]) for axis in range(4))

    q = graph.tensor((B, N, T, D), laid_out((B, N, T, D)))
    out, _ = graph.sdpa(q, heads(graph, "k", B, NK, S, D), heads(graph, "v", B, NK, S, DV))
    assert out.stride == laid_out((B, N, T, DV))


def test_a_broadcast_axis_of_q_is_outermost_in_the_output(graph) -> None:
    q = graph.tensor((B, N, T, D), (T * D, 0, D, 1))
    out, _ = graph.sdpa(q, heads(graph, "k", B, NK, S, D), heads(graph, "v", B, NK, S, DV))
    assert out.stride == (T * DV, B * T * DV, DV, 1)


def test_q_inside_a_fused_projection_gives_a_dense_output(graph) -> None:
    fused = N + 2 * NK
    q = graph.tensor((B, N, T, D), (T * fused * D, D, fused * D, 1))
    out, _ = graph.sdpa(q, heads(graph, "k", B, NK, S, D), heads(graph, "v", B, NK, S, DV))
    assert out.stride == (T * N * DV, DV, N * DV, 1)


@pytest.mark.parametrize(("b", "t", "s"), [(B, 0, S), (B, T, 0), (0, T, S), (B, 1, 1), (0, 0, 0)])
def test_empty_and_single_lengths_are_legal(graph, b, t, s) -> None:
    out, stats = graph.sdpa(**qkv(graph, t, s, b), generate_stats=True)
    assert (out.dim, stats.dim) == ((b, N, t, DV), (b, N, t, 1))
    assert out.stride == (t * N * DV, DV, N * DV, 1)
    out.set_output(True)
    stats.set_output(True)
    graph.freeze()


def test_stats_is_packed_float32(graph) -> None:
    _, stats = graph.sdpa(**qkv(graph), generate_stats=True)
    assert (stats.dim, stats.stride, stats.data_type) == ((B, N, T, 1), (N * T, T, 1, 1), data_type.FLOAT)
    assert stats.set_output(True).data_type is data_type.FLOAT


@pytest.mark.parametrize(
    ("options", "exists"),
    [
        ({"generate_stats": True}, True),
        ({"generate_stats": False}, False),
        ({"is_inference": True}, False),
        ({"is_inference": False}, True),
        ({"is_inference": True, "generate_stats": False}, False),
        ({}, False),
    ],
)
def test_stats_exists_when_asked_for_and_is_none_otherwise(graph, options, exists) -> None:
    _, stats = graph.sdpa(**qkv(graph), **options)
    (node,) = graph.nodes
    assert (stats is not None) == exists == ("Stats" in node.outputs) == node.params["generate_stats"]
    assert "is_inference" not in node.params


def test_ports_and_parameters_of_the_node(graph) -> None:
    ports = qkv(graph)
    bias = graph.tensor((1, N, T, S), name="bias")
    padding = lengths(graph)
    graph.sdpa(bias=bias, attn_scale=0.5, diagonal_band_right_bound=0, **padding, **ports, name="attend")
    (node,) = graph.nodes
    assert node.type == "SDPA" and node.name == "attend"
    assert list(node.inputs) == ["q", "k", "v", "bias", "seq_len_q", "seq_len_kv"]
    given = {name: value for name, value in node.params.items() if value is not None and value is not False}
    assert given == {
        "attn_scale": 0.5,
        "use_padding_mask": True,
        "diagonal_alignment": "TOP_LEFT",
        "diagonal_band_right_bound": 0,
    }
    assert node.params["dropout"] is None and node.params["use_alibi_mask"] is False


def test_attn_scale_is_a_parameter_or_a_port(graph) -> None:
    scale = graph.scalar(0.5, "float32")
    graph.sdpa(**qkv(graph), attn_scale=1)
    graph.sdpa(**qkv(graph), attn_scale=scale)
    number, tensor = graph.nodes
    assert number.params["attn_scale"] == 1.0 and isinstance(number.params["attn_scale"], float)
    assert "attn_scale" not in number.inputs
    assert tensor.params["attn_scale"] is None and tensor.inputs["attn_scale"] is scale


def test_alignment_takes_an_enum_member_by_name(graph) -> None:
    class Member:
        name = "BOTTOM_RIGHT"

    graph.sdpa(**qkv(graph), diagonal_alignment=Member())
    graph.sdpa(**qkv(graph), diagonal_alignment="bottom_right")
    assert [node.params["diagonal_alignment"] for node in graph.nodes] == ["BOTTOM_RIGHT"] * 2


def test_a_precision_is_a_name(graph) -> None:
    graph.sdpa(**qkv(graph), softmax_precision="FLOAT")
    graph.sdpa(**qkv(graph), softmax_precision=data_type.FLOAT)
    assert [node.params["softmax_precision"] for node in graph.nodes] == ["FLOAT"] * 2
    with pytest.raises(GraphValidationError, match=r"softmax_precision is 32; the rule: a string"):
        graph.sdpa(**qkv(graph), softmax_precision=32)


def test_dropout_is_taken_apart(graph) -> None:
    seed, offset = (graph.tensor((1, 1, 1, 1), data_type="int64") for _ in range(2))
    graph.sdpa(**qkv(graph), dropout=(0.25, seed, offset))
    mask, scale = graph.tensor((B, N, T, S)), graph.tensor((1, 1, 1, 1), data_type="float32")
    graph.sdpa(**qkv(graph), dropout=(mask, scale))
    inverse = graph.tensor((1, 1, 1, 1), data_type="float32")
    graph.sdpa_backward(**backward_ports(graph), dropout=[mask, scale, inverse])
    random, masked, backward = graph.nodes
    assert backward.inputs["dropout_scale_inv"] is inverse and backward.inputs["dropout_mask"] is mask
    assert random.params["dropout"] == 0.25
    assert (random.inputs["seed"], random.inputs["offset"]) == (seed, offset)
    assert masked.params["dropout"] is None
    assert (masked.inputs["dropout_mask"], masked.inputs["dropout_scale"]) == (mask, scale)


def test_running_lengths_have_one_more_than_the_batch(graph) -> None:
    ends = {name: graph.tensor((B + 1, 1, 1, 1), data_type="int32") for name in ("cu_seq_len_q", "cu_seq_len_kv")}
    graph.sdpa(**qkv(graph), **ends, use_padding_mask=True)
    assert list(graph.nodes[0].inputs)[-2:] == ["cu_seq_len_q", "cu_seq_len_kv"]


def test_paged_keys_and_values_take_their_length_from_the_bound(graph) -> None:
    table = [graph.tensor((B, 1, 4, 1), data_type="int32") for _ in range(2)]
    pages_k, pages_v = graph.tensor((9, NK, 4, D)), graph.tensor((9, NK, 4, DV))
    q, bias = heads(graph, "q", B, N, T, D), graph.tensor((1, 1, T, S))
    keywords = dict(zip(("paged_attention_k_table", "paged_attention_v_table"), table, strict=True))
    out, _ = graph.sdpa(q, pages_k, pages_v, bias=bias, paged_attention_max_seq_len_kv=S, **keywords)
    assert out.dim == (B, N, T, DV)
    with pytest.raises(GraphValidationError, match=r"bias has dim"):
        graph.sdpa(q, pages_k, pages_v, bias=bias, paged_attention_max_seq_len_kv=S - 1, **keywords)
    mask = graph.tensor((1, 1, 1, S))
    graph.sdpa(q, pages_k, pages_v, bias=graph.tensor((1, 1, 1, 1)), kv_mask=mask, **keywords)


def test_gradients_are_laid_out_as_their_inputs(graph) -> None:
    ports = backward_ports(graph)
    ports["k"] = graph.tensor((B, NK, S, D))
    made = graph.sdpa_backward(**ports)
    for gradient, port in zip(made, ("q", "k", "v"), strict=True):
        assert (gradient.dim, gradient.stride) == (ports[port].dim, ports[port].stride)
    (node,) = graph.nodes
    assert node.type == "SDPA_BACKWARD"
    assert list(node.inputs) == ["q", "k", "v", "o", "dO", "stats"]
    assert list(node.outputs) == ["dQ", "dK", "dV"]


def test_a_cotangent_of_stats_is_a_port(graph) -> None:
    cotangent = graph.tensor((B, N, T, 1), data_type="float32")
    graph.sdpa_backward(**backward_ports(graph), dStats=cotangent)
    assert graph.nodes[0].inputs["dStats"] is cotangent


@pytest.mark.parametrize("dim", [(1, N, T, S), (B, N, T, S), (1, 1, T, S), (B, 1, 1, S)])
def test_the_bias_gradient_is_an_output_that_the_caller_makes(graph, dim) -> None:
    bias, gradient = graph.tensor(dim, name="bias"), graph.tensor(dim, name="dBias")
    made = graph.sdpa_backward(**backward_ports(graph), bias=bias, dBias=gradient)
    for tensor in made:
        tensor.set_output(True)
    (node,) = graph.nodes
    assert gradient.producer is node and node.outputs["dBias"] is gradient and "dBias" not in node.inputs
    assert graph.outputs == [*made, gradient] and gradient not in graph.inputs
    graph.freeze()


def forward_case(port, dim, **more):
    return lambda graph: graph.sdpa(**qkv(graph) | {port: graph.tensor(dim, name=port, **more)})


def backward_case(port, dim, **more):
    return lambda graph: graph.sdpa_backward(**backward_ports(graph) | {port: graph.tensor(dim, **more)})


def options(**keywords):
    return lambda graph: graph.sdpa(**qkv(graph), **keywords)


def with_lengths(**changes):
    def build(graph):
        made = {name: graph.tensor(dim, data_type="int32") for name, dim in changes.items()}
        return graph.sdpa(**qkv(graph), **lengths(graph) | made)

    return build


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (forward_case("q", (B, T, D)), r"sdpa: q has dim \(2, 8, 32\), rank 3; the rule: rank 4, \(B, N, T, D\)"),
        (forward_case("k", (B, NK, S, D, 1)), r"k has dim .* rank 5; the rule: rank 4"),
        (forward_case("k", (B + 1, NK, S, D)), r"k has dim \(3, 2, 16, 32\); the rule: .* with B = 2"),
        (forward_case("v", (B + 1, NK, S, DV)), r"v has dim .* with B = 2"),
        (forward_case("k", (B, NK, S, D + 1)), r"k has dim .* D = 32"),
        (forward_case("v", (B, NK, S + 1, DV)), r"v has dim .* S = 16"),
        (forward_case("v", (B, 1, S, DV)), r"v has dim .* NK = 2"),
        (forward_case("q", (B, 3, T, D)), r"q has N = 3, where NK = 2; the rule: N is a multiple of NK"),
        (forward_case("q", (B, 0, T, D)), r"q has N = 0; the rule: N, NK, D, DV are at least 1"),
        (forward_case("v", (B, NK, S, 0)), r"v has DV = 0"),
        (
            forward_case("bias", (B, 3, T, S)),
            r"bias has dim .*; the rule: broadcastable to \(B, N, T, S\) with .*N = 4",
        ),
        (forward_case("bias", (T, S)), r"bias has dim \(8, 16\), rank 2; the rule: rank 4, broadcastable"),
        (forward_case("bias", (B, N, T, S + 1)), r"bias has dim .* S = 16"),
        (forward_case("sink_token", (1, NK, 1, 1)), r"sink_token has dim .*\(1, N, 1, 1\) with N = 4"),
        (forward_case("attn_scale", (1, 1, 1, 2)), r"attn_scale has dim .*; the rule: \(1, 1, 1, 1\)"),
        (forward_case("score_max", (B, N, T, 2)), r"score_max has dim .*; the rule: \(B, N, T, 1\)"),
        (
            forward_case("cu_seq_len_q", (B, 1, 1, 1), data_type="int32"),
            r"cu_seq_len_q has dim .*\(B\+1, 1, 1, 1\) with B = 2",
        ),
        (with_lengths(seq_len_q=(B, 1)), r"seq_len_q has dim \(2, 1\), rank 2; the rule: rank 4, \(B, 1, 1, 1\)"),
        (with_lengths(seq_len_kv=(B + 1, 1, 1, 1)), r"seq_len_kv has dim .* with B = 2"),
        (options(use_padding_mask=True), r"use_padding_mask is True with no lengths; the rule: it needs seq_len_q and"),
        (options(is_inference=True, generate_stats=True), r"is_inference is True and generate_stats is True"),
        (options(diagonal_band_right_bound=-1), r"diagonal_band_right_bound is -1; the rule: at least 0"),
        (options(diagonal_band_left_bound=-1), r"diagonal_band_left_bound is -1; the rule: at least 0"),
        (options(sliding_window_length=2, diagonal_band_left_bound=2), r"sliding_window_length came with diagonal"),
        (options(use_causal_mask=True, use_causal_mask_bottom_right=True), r"use_causal_mask came with"),
        (options(diagonal_alignment="left"), r"diagonal_alignment is 'left'; the rule: one of 'TOP_LEFT', 'BOTTOM_R"),
        (options(use_causal_mask="yes"), r"use_causal_mask is 'yes'; the rule: True or False"),
        (options(dropout=0.5), r"dropout is 0.5; the rule: \(probability, seed, offset\)"),
        (options(dropout=(1.5, None, None)), r"dropout has probability 1.5; the rule: 0 <= probability < 1"),
        (options(bias=0.5), r"bias is 0.5; the rule: a tensor of this graph"),
        (options(score_max=1), r"score_max is 1; the rule: a tensor of this graph, made for it"),
        (backward_case("o", (B, N, T, D)), r"sdpa_backward: o has dim .* DV = 24"),
        (backward_case("dO", (B, N, T + 1, DV)), r"dO has dim .* T = 8"),
        (backward_case("stats", (B, N, T)), r"stats has dim .* rank 3; the rule: rank 4, \(B, N, T, 1\)"),
        (backward_case("dStats", (B, N, 1, T)), r"dStats has dim .*; the rule: \(B, N, T, 1\)"),
        (backward_case("dBias", (B, N, T, S)), r"dBias came without bias; the rule: it is the gradient of bias"),
    ],
)
def test_a_broken_rule_is_named_at_the_call(graph, build, message) -> None:
    with pytest.raises(GraphValidationError, match=message):
        build(graph)
    assert graph.nodes == ()


def test_lengths_without_the_padding_mask_are_refused(graph) -> None:
    given = lengths(graph) | {"use_padding_mask": False}
    with pytest.raises(GraphValidationError, match=r"seq_len_q came with use_padding_mask False"):
        graph.sdpa(**qkv(graph), **given)


@pytest.mark.parametrize(
    ("port", "dim", "came"),
    [("seq_len_q", (B, 1, 1, 1), "int64"), ("sink_token", (1, N, 1, 1), "bfloat16")],
)
def test_a_ports_data_type_is_checked(graph, port, dim, came) -> None:
    given = lengths(graph) | {port: graph.tensor(dim, data_type=came)}
    out, _ = graph.sdpa(**qkv(graph), **given)
    out.set_output(True)
    with pytest.raises(GraphValidationError, match=rf"sdpa: {port} has data type {came}; the rule: "):
        graph.validate()


def test_stats_of_another_type_is_refused(graph) -> None:
    out, stats = graph.sdpa(**qkv(graph), generate_stats=True)
    out.set_output(True)
    stats.set_output(True).set_data_type("bfloat16")
    with pytest.raises(GraphValidationError, match=r"Stats was set to data type bfloat16; the rule: float32"):
        graph.validate()


def test_an_output_of_another_owner_is_refused(graph) -> None:
    bias = graph.tensor((1, N, T, S))
    taken = graph.tensor((1, N, T, S))
    graph.neg(taken)
    for wrong in (bias, taken, graph.nodes[0].outputs["OUT_0"]):
        with pytest.raises(GraphValidationError, match=r"dBias is .*; the rule: an output is made by one port"):
            graph.sdpa_backward(**backward_ports(graph), bias=bias, dBias=wrong)


def test_one_tensor_for_two_outputs_is_refused(graph) -> None:
    both = graph.tensor((B, N, T, 1), data_type="float32")
    with pytest.raises(GraphValidationError, match=r"score_sum_exp is .*; the rule: an output is made by one port"):
        graph.sdpa(**qkv(graph), score_max=both, score_sum_exp=both)


def test_a_function_over_the_logits_is_not_supported(graph) -> None:
    with pytest.raises(GraphNotSupportedError, match=r"sdpa: score_mod: .*write it as bias"):
        graph.sdpa(**qkv(graph), score_mod=lambda graph, score: score)


def quantised(graph: pygraph, name: str, **options: Any) -> Any:
    """A call of a quantised variant: q, k, v as ever, what has their role, and scales of one number."""
    operation = OPERATIONS[name]
    like = {"o": (B, N, T, DV), "dO": (B, N, T, DV), "stats": (B, N, T, 1)}
    ports: dict[str, Any] = qkv(graph)
    for port in operation.inputs:
        if not port.optional and port.name not in ports:
            ports[port.name] = graph.tensor(like.get(port.name.removesuffix("_f16"), (1, 1, 1, 1)), data_type="float32")
    return getattr(graph, name)(**ports, **options)


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("sdpa_fp8", {"O": (B, N, T, DV), "Stats": None, "Amax_S": (1, 1, 1, 1), "Amax_O": (1, 1, 1, 1)}),
        ("sdpa_mxfp8", {"O": (B, N, T, DV), "Stats": None, "Amax_O": (1, 1, 1, 1)}),
        (
            "sdpa_fp8_backward",
            {"dQ": (B, N, T, D), "dK": (B, NK, S, D), "dV": (B, NK, S, DV)}
            | dict.fromkeys(("amax_dQ", "amax_dK", "amax_dV", "amax_dP"), (1, 1, 1, 1)),
        ),
        (
            "sdpa_mxfp8_backward",
            {"dQ": (B, N, T, D), "dK": (B, NK, S, D), "dV": (B, NK, S, DV)}
            | dict.fromkeys(("amax_dQ", "amax_dK", "amax_dV"), (1, 1, 1, 1)),
        ),
    ],
)
def test_a_quantised_variant_infers_its_outputs(name, outputs) -> None:
    graph = pygraph(io_data_type="float8_e4m3fn")
    made = quantised(graph, name)
    assert [each and each.dim for each in made] == list(outputs.values())
    for tensor in made:
        if tensor is not None:
            tensor.set_output(True)
    graph.validate()
    assert graph.nodes[0].type == name.upper()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "sdpa_fp8",
            {"sliding_window": 2, "left_bound": 2},
            "sliding_window came with left_bound; the rule: they are one",
        ),
        ("sdpa_fp8", {"left_bound": -1}, "left_bound is -1; the rule: at least 0"),
        ("sdpa_fp8", {"is_inference": True, "generate_stats": True}, "is_inference is True and generate_stats is True"),
        ("sdpa_mxfp8", {"use_padding_mask": True}, "use_padding_mask is True with no lengths"),
    ],
)
def test_a_quantised_variant_has_the_rules_of_attention(name, options, message) -> None:
    with pytest.raises(GraphValidationError, match=message):
        quantised(pygraph(io_data_type="float8_e4m3fn"), name, **options)
