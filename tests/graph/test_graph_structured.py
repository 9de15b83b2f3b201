"""The structured table's shape rules: what each operation infers, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cudnn_jax.graph import GraphValidationError, Tensor, data_type, pygraph

FLOAT, HALF = data_type.FLOAT, data_type.HALF
N, C, H, W, K, R = 2, 6, 8, 9, 4, 3
CHANNELS_LAST = (C * H * W, 1, W * C, C)
INT32 = {"data_type": "int32"}


@pytest.fixture
def graph() -> pygraph:
    return pygraph(io_data_type=HALF)


def call(name: str, *dims: Any, **more: Any) -> Callable[[pygraph], Any]:
    """A call whose positional arguments are tensors of these dims, or what makes them."""

    def build(graph: pygraph) -> Any:
        given = {key: value(graph) if callable(value) else value for key, value in more.items()}
        placed = (dim(graph) if callable(dim) else dim and graph.tensor(dim) for dim in dims)
        return getattr(graph, name)(*placed, **given)

    return build


def make(dim: Any, stride: Any = None, kind: Any = None) -> Callable[[pygraph], Tensor]:
    return lambda graph: graph.tensor(dim, stride, kind)


def several(*dims: Any, kinds: Any = (HALF,) * 9) -> Callable[[pygraph], list[Tensor]]:
    return lambda graph: [graph.tensor(dim, data_type=kind) for dim, kind in zip(dims, kinds, strict=False)]


def then_dim(build: Callable[[pygraph], Any], dim: Any) -> Callable[[pygraph], Any]:
    def made(graph: pygraph) -> Any:
        return build(graph).set_output(True).set_dim(dim)

    return made


def last(dim: Any) -> tuple[int, ...]:
    """Strides with the channels fastest."""
    _, c, h, w = dim
    return (c * h * w, 1, w * c, c)


X4 = make((N, C, H, W), CHANNELS_LAST)
TRAINING = {"epsilon": 1e-5, "norm_forward_phase": "TRAINING"}
STAT = {"kind": FLOAT}
IMAGE, FILTER = (N, C, H, W), (K, C, R, R)
ROUTED = {"first_token_offset": make((3, 1, 1), kind="int32")}
INDEX = {"token_index": make((1, 8, 1), kind="int32")}
KS = {"token_ks": make((1, 8, 1), kind="int32")}


@pytest.mark.parametrize(
    ("build", "made"),
    [
        (
            call("layernorm", X4, (1, C, 1, 1), (1, C, 1, 1), **TRAINING),
            [((N, C, H, W), CHANNELS_LAST), ((N, 1, H, W), (H * W, 1, W, 1)), ((N, 1, H, W), (H * W, 1, W, 1))],
        ),
        (
            call(
                "layernorm_backward", (N, C), (N, C), None, mean=make((N, 1), **STAT), inv_variance=make((N, 1), **STAT)
            ),
            [((N, C), (C, 1)), None, None],
        ),
        (
            call("adalayernorm", (N, H, C), (N, 1, C), (N, 1, C), **TRAINING),
            [((N, H, C), (H * C, C, 1)), ((N, H, 1), (H, 1, 1)), ((N, H, 1), (H, 1, 1))],
        ),
        (
            call("adalayernorm", (N, H, C), (1, 1, C), (1, 1, C), epsilon=0.1, norm_forward_phase="INFERENCE"),
            [((N, H, C), (H * C, C, 1)), None, None],
        ),
        (
            call("instancenorm", (N, C, H), (1, C, 1), (1, C, 1), **TRAINING),
            [((N, C, H), (C * H, H, 1)), ((N, C, 1), (C, 1, 1)), ((N, C, 1), (C, 1, 1))],
        ),
        (
            call("batchnorm", (N, C, H), (1, C, 1), (1, C, 1), epsilon=0.1),
            [((N, C, H), (C * H, H, 1)), ((1, C, 1), (C, 1, 1)), ((1, C, 1), (C, 1, 1)), None, None],
        ),
        (
            call(
                "batchnorm",
                (N, C),
                (1, C),
                (1, C),
                in_running_mean=make((1, C), **STAT),
                in_running_var=make((1, C), **STAT),
                epsilon=0.1,
                momentum=0.5,
                peer_stats=several((2, C), (2, C)),
            ),
            [((N, C), (C, 1)), *([((1, C), (C, 1))] * 4)],
        ),
        (call("batchnorm_inference", (N, C), (1, C), (1, C), (1, C), (1, C)), [((N, C), (C, 1))]),
        (
            call(
                "batchnorm_backward",
                (N, C),
                (N, C),
                (1, C),
                mean=make((1, C), **STAT),
                inv_variance=make((1, C), **STAT),
            ),
            [((N, C), (C, 1)), ((1, C), (C, 1)), ((1, C), (C, 1))],
        ),
        (call("genstats", (N, C, H)), [((1, C, 1), (C, 1, 1))] * 2),
        (then_dim(call("reduction", X4, mode="ADD"), (1, C, 1, W)), [((1, C, 1, W), (C * W, 1, W * C, C))]),
        (
            then_dim(call("reduction", (1, 8, C), group_offset=make((3, 1, 1), kind="int32"), mode="MAX"), (3, 1, C)),
            [((3, 1, C), (C, C, 1))],
        ),
        (call("block_scale_dequantize", (4, 64), (4, 2), block_size=32), [((4, 64), (64, 1))]),
        (call("block_scale_dequantize", (64, 48), (2, 2), block_size=(32, 24)), [((64, 48), (48, 1))]),
        (call("block_scale_quantize", (4, 40), block_size=16), [((4, 40), (40, 1)), ((4, 3), (3, 1))]),
        (
            call("block_scale_quantize", (1, 64, 8), block_size=32, axis=1, transpose=True),
            [((1, 64, 8), (64, 1, 64)), ((1, 2, 8), (2, 1, 2))],
        ),
        (call("moe_grouped_matmul", (1, 8, 4), (3, 4, 5), **ROUTED), [((1, 8, 5), (40, 5, 1))]),
        (
            call("moe_grouped_matmul", (1, 5, 4), (3, 4, 5), **ROUTED, **INDEX, mode="GATHER"),
            [((1, 8, 5), (40, 5, 1))],
        ),
        (
            call("moe_grouped_matmul", (1, 8, 4), (3, 4, 5), **ROUTED, **INDEX, **KS, mode="SCATTER", top_k=2),
            [((1, 8, 5), (40, 5, 1))],
        ),
        (
            call(
                "moe_grouped_matmul",
                (1, 8, 4),
                (3, 4, 5),
                **ROUTED,
                **INDEX,
                **KS,
                top_k_scores=make((1, 8, 1)),
                mode="COMBINE",
                top_k=2,
            ),
            [((1, 4, 5), (20, 5, 1))],
        ),
        (call("moe_grouped_matmul_bwd", (1, 8, 5), (1, 8, 4), **ROUTED), [((3, 4, 5), (20, 1, 4))]),
        (call("conv_fprop", IMAGE, FILTER), [((N, K, 6, 7), (168, 42, 7, 1))]),
        (
            call("conv_fprop", X4, (K, C // 2, R, R), padding=(1, 1), stride=(2, 1), dilation=(1, 2)),
            [((N, K, 4, 7), last((N, K, 4, 7)))],
        ),
        (call("conv_fprop", (N, C, H), (K, C, R), pre_padding=[2], post_padding=[0]), [((N, K, H), (K * H, H, 1))]),
        (then_dim(call("conv_dgrad", (N, K, 3, 4), FILTER, stride=(2, 2)), IMAGE), [(IMAGE, (C * H * W, H * W, W, 1))]),
        (then_dim(call("conv_wgrad", IMAGE, (N, K, 6, 7)), FILTER), [(FILTER, (54, 9, 3, 1))]),
        (then_dim(call("reshape", (4, 6)), (2, 2, 6)), [((2, 2, 6), (12, 6, 1))]),
        (call("slice", (4, 6), slices=[(1, 4, 2), slice(0, 3)]), [((2, 3), (3, 1))]),
        (call("slice", (4, 6), slices=[(1, 4)]), [((3, 6), (6, 1))]),
        (call("transpose", (2, 3, 4), permutation=(2, 0, 1)), [((4, 2, 3), (1, 12, 4))]),
        (call("concatenate", inputs=several((2, 3), (2, 5)), axis=1), [((2, 8), (8, 1))]),
        (call("rope", (2, 3, 5, 8), (1, 1, 5, 8)), [((2, 3, 5, 8), (120, 40, 8, 1))]),
        (
            call("rope_backward", (2, 3, 5, 8), (1, 1, 5, 4), rope_dim=4, output_scale=2),
            [((2, 3, 5, 8), (120, 40, 8, 1))],
        ),
    ],
)
def test_what_is_inferred(graph, build, made) -> None:
    result = build(graph)
    results = result if isinstance(result, tuple) else (result,)
    assert [each and (each.dim, each.stride) for each in results] == made
    for each in results:
        if each is not None:
            each.set_output(True)
    graph.freeze()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            call("adalayernorm", (N, H, C), (3, 1, C), (3, 1, C), **TRAINING),
            r"scale has dim \(3, 1, 6\); the rule: the",
        ),
        (
            call("adalayernorm", (N, H, C), (N, 1, C), (1, 1, C), **TRAINING),
            r"bias has dim \(1, 1, 6\); the rule: \(2, 1",
        ),
        (
            call("instancenorm", (N, C, H), (1, 1, H), (1, C, 1), **TRAINING),
            r"scale has dim .* \(1, 6, 1\), the channels",
        ),
        (call("instancenorm", (N, C, 0), (1, C, 1), (1, C, 1), **TRAINING), r"input has dim .* at least 1 long"),
        (
            call("batchnorm", (N,), (N,), (N,), epsilon=0.1),
            r"input has dim \(2,\); the rule: \(N, C, ...\), rank at least 2",
        ),
        (
            call("batchnorm", (N, C), (1, C), (1, C), in_running_mean=make((1, C)), epsilon=0.1),
            r"in_running_mean came alone; the rule: both",
        ),
        (
            call("batchnorm", (N, C), (1, C), (1, C), (1, C), (1, C), epsilon=0.1),
            r"in_running_mean came without momentum",
        ),
        (
            call("batchnorm", (N, C), (1, C), (1, C), epsilon=0.1, momentum=1.5),
            r"momentum is 1.5; the rule: a number from",
        ),
        (call("batchnorm_inference", (N, C), (1, C), (1, 1), (1, C), (1, C)), r"inv_variance has dim \(1, 1\)"),
        (
            call("layernorm_backward", (N, C), (N, C), (1, C), (1, C), (N, 1)),
            r"mean has dim \(1, 6\); the rule: 1 on the",
        ),
        (call("genstats", (N,)), r"input has dim \(2,\); the rule: \(N, C"),
        (call("reduction", (2, 3), mode="MEAN"), r"mode is 'MEAN'; the rule: one of 'ADD'"),
        (call("block_scale_dequantize", (4, 64), (4, 3), block_size=32), r"descale has dim \(4, 3\); .* \(4, 2\)"),
        (call("block_scale_dequantize", (4, 64), (2,), block_size=32), r"descale has dim \(2,\); the rule: the rank"),
        (
            call("block_scale_dequantize", (4,), (4,), block_size=(1, 1)),
            r"block_size is \(1, 1\); the rule: one integer, or",
        ),
        (call("block_scale_quantize", (4, 64), block_size=0), r"block_size is 0; the rule: at least 1"),
        (
            call("block_scale_quantize", (4, 64), block_size=32, axis=2),
            r"axis is 2; the rule: an axis of input, 0 to 1",
        ),
        (call("moe_grouped_matmul", (1, 8, 4), (3, 5, 5), **ROUTED), r"weight has dim \(3, 5, 5\).* K = 4"),
        (
            call("moe_grouped_matmul", (1, 8, 4), (2, 4, 5), **ROUTED),
            r"first_token_offset has E = 3, where EXPERTS = 2",
        ),
        (
            call("moe_grouped_matmul", (1, 8, 4), (3, 4, 5), **ROUTED, mode="GATHER"),
            r"token_index is missing; .* GATHER",
        ),
        (call("moe_grouped_matmul", (1, 8, 4), (3, 4, 5), **ROUTED, **INDEX), r"token_index came; the rule: mode NONE"),
        (
            call("moe_grouped_matmul", (1, 8, 4), (3, 4, 5), **ROUTED, **INDEX, **KS, mode="SCATTER", top_k=3),
            r"top_k is 3; the rule: at least 1, and divides the 8 rows",
        ),
        (call("conv_fprop", (N, C), (K, C)), r"dims are image \(2, 6\), weight .* one rank, at least 3"),
        (call("conv_fprop", IMAGE, (K, 4, R, R)), r"dims are image .* the image's channels are a multiple"),
        (call("conv_fprop", IMAGE, (K, 2, R, R)), r"its filters one of the groups"),
        (call("conv_fprop", IMAGE, (K, C, 9, 9)), r"the filter is at least 1 long and fits"),
        (call("conv_fprop", IMAGE, FILTER, stride=(0, 1)), r"stride is \(0, 1\); the rule: 2 integers, at least 1"),
        (call("conv_fprop", IMAGE, FILTER, padding=(1,)), r"pre_padding is \(1,\); the rule: 2 integers"),
        (call("conv_fprop", IMAGE, FILTER, padding=(1, 1), pre_padding=(2, 2)), r"padding is \(1, 1\) and pre_padding"),
        (call("conv_fprop", IMAGE, FILTER, padding="11"), r"padding is '11'; the rule: a sequence of integers"),
        (
            call("slice", (4, 6), slices=[(1, 5)]),
            r"slices has \(1, 5, 1\) at axis 0; the rule: 0 <= start <= stop <= 4",
        ),
        (call("slice", (4, 6), slices=[(0, 4, 0)]), r"step at least 1"),
        (call("slice", (4,), slices=[(0, 4), (0, 1)]), r"slices has 2 entries; the rule: at most one"),
        (call("slice", (4,), slices=[1]), r"slices is \[1\]; the rule: for each axis"),
        (
            call("transpose", (2, 3), permutation=(0, 0)),
            r"permutation is \(0, 0\); the rule: each axis of input, 0 to 1",
        ),
        (
            call("concatenate", inputs=several((2, 3), (3, 3)), axis=1),
            r"inputs\[1\] has dim \(3, 3\); the rule: the dims",
        ),
        (call("concatenate", inputs=several((2, 3)), axis=2), r"axis is 2; the rule: an axis of inputs, 0 to 1"),
        (call("concatenate", inputs=several((2,)), axis=0, in_place_index=1), r"in_place_index is 1; the rule: one of"),
        (
            call("concatenate", inputs=several((2,), (2,), kinds=(HALF, FLOAT)), axis=0),
            r"inputs\[1\] has data type float32; the rule: float16",
        ),
        (call("concatenate", inputs=(), axis=0), r"inputs is \(\); the rule: a sequence of tensors of this graph"),
        (call("concatenate", inputs=(1,), axis=0), r"inputs is \(1,\); the rule: a sequence of tensors"),
        (call("rope", (2, 5, 8), (1, 5, 6)), r"freqs has dim \(1, 5, 6\); .* broadcasts to \(2, 5, 8\)"),
        (call("rope", (2, 5, 8), (1, 5, 3), rope_dim=3), r"rope_dim is 3; the rule: even, 0 to 8"),
    ],
)
def test_a_broken_rule_is_named_at_the_call(graph, build, message) -> None:
    with pytest.raises(GraphValidationError, match=message):
        build(graph)
    assert graph.nodes == ()


@pytest.mark.parametrize(
    ("build", "dim", "message"),
    [
        (call("reduction", (2, 3), mode="ADD"), (2, 2), r"OUT_0 has dim \(2, 2\); the rule: each 1, which is folded"),
        (call("reduction", (2, 3), mode="ADD"), (2,), r"OUT_0 has dim \(2,\)"),
        (call("reshape", (2, 3)), (4, 2), r"OUT_0 has dim \(4, 2\); the rule: as many elements"),
        (
            call("conv_dgrad", (N, K, 6, 7), FILTER),
            (N, C, 9, 9),
            r"DX has dim .* these dims makes \(2, 4, 7, 7\), loss has",
        ),
        (call("conv_wgrad", IMAGE, (N, K, 6, 7)), (K, C, 2, R), r"DW has dim .* these dims makes \(2, 4, 7, 7\)"),
        (call("conv_wgrad", IMAGE, (N, K, 6, 7)), (K, C, R), r"DW has dim \(4, 6, 3\); the rule: the rank of loss"),
    ],
)
def test_dims_that_the_caller_sets_fit_the_inputs(graph, build, dim, message) -> None:
    out = build(graph).set_output(True)
    with pytest.raises(GraphValidationError, match=r"has no dims; the rule: set_dim"):
        graph.validate()
    with pytest.raises(GraphValidationError, match=r"has no dims yet; the rule: set_dim"):
        graph.neg(out)
    out.set_dim(dim)
    with pytest.raises(GraphValidationError, match=message):
        graph.validate()


def test_a_view_moves_nothing(graph) -> None:
    turned = graph.transpose(graph.tensor((2, 3)), (1, 0))
    graph.reshape(turned, reshape_mode="LOGICAL").set_output(True).set_dim((6,))
    graph.validate()
    graph.reshape(turned).set_output(True).set_dim((6,))
    with pytest.raises(
        GraphValidationError, match=r"input has dim \(3, 2\) and stride \(1, 3\); the rule: row-major, or"
    ):
        graph.validate()


def test_what_follows_a_reduction_follows_its_dims(graph) -> None:
    out = graph.reduction(graph.tensor((2, 3)), mode="ADD").set_dim((2, 1))
    follower = graph.exp(out).set_output(True)
    out.set_dim((1, 3))
    assert follower.dim == (1, 3)
    graph.validate()


def test_what_moves_elements_keeps_their_type(graph) -> None:
    x = graph.tensor((2, 4), data_type="int8")
    moved = graph.reshape(graph.transpose(graph.slice(x, [(0, 1)]), (1, 0))).set_dim((2, 2))
    joined = graph.concatenate([moved, moved], 0).set_output(True)
    assert joined.data_type is data_type.INT8
    graph.validate()
    joined.set_data_type("float32")
    with pytest.raises(GraphValidationError, match=r"OUT_0 was set to data type float32; the rule: int8"):
        graph.validate()


def test_spellings_of_one_convolution_are_one() -> None:
    def digest(**options: Any) -> str:
        graph = pygraph(io_data_type=HALF)
        call("conv_fprop", IMAGE, FILTER, **options)(graph).set_output(True)
        return graph.hash()

    assert digest(padding=(1, 2)) == digest(pre_padding=(1, 2), post_padding=(1, 2))
    assert digest() == digest(padding=(0, 0), stride=(1, 1), dilation=[1, 1], convolution_mode="cross_correlation")
    assert len({digest(), digest(stride=(2, 1)), digest(stride=(1, 2)), digest(convolution_mode="CONVOLUTION")}) == 4


def test_a_list_of_ports_is_written_port_by_port(graph) -> None:
    a, b = graph.tensor((2,)), graph.tensor((3,))
    graph.concatenate([b, a, b], 0).set_output(True)
    (node,) = graph.nodes
    assert list(node.inputs) == ["inputs[0]", "inputs[1]", "inputs[2]"]
    assert graph.inputs == [b, a] and graph.outputs[0].dim == (8,)
    assert graph.canonical()["nodes"][0]["inputs"] == {"inputs[0]": 0, "inputs[1]": 1, "inputs[2]": 0}
    assert [name for _, name, _ in node.wired] == list(node.inputs)


def test_lists_are_lists_in_the_canonical_form(graph) -> None:
    graph.slice(graph.tensor((4, 6)), [(1, 4), slice(0, 6, 2)]).set_output(True)
    assert graph.canonical()["nodes"][0]["params"] == {"slices": [[1, 4, 1], [0, 6, 2]]}
