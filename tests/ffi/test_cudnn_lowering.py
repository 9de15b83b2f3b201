"""What of a graph reaches cuDNN: which operands in which order, whose layouts, and float8 attention's ports."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from cudnn_graphs import attention, matmul

import cudnn_jax
from cudnn_jax import engines
from cudnn_jax import graph as graph_room
from cudnn_jax.graph import Tensor, pygraph
from support import operations
from support.stub_libcuda import H200, Planner, Refused, planner, stub_folder

__all__ = ["planner", "stub_folder"]

_keys = itertools.count()


def lower(planner: Planner, graph: pygraph) -> tuple[list[int], dict[int, tuple[tuple[int, ...], ...]]]:
    """The uids that the caller fills, and (dim, stride) of each tensor, by canonical index."""
    key = f"lowered {next(_keys)}"
    uids = planner.ask("lower", key=key, graph=graph.canonical_json(), properties=H200)
    layouts = planner.ask("layouts", key=key)
    return [uid - 1 for uid in uids], {int(uid) - 1: tuple(map(tuple, layout)) for uid, layout in layouts.items()}


def index_of(graph: pygraph, tensor: Tensor) -> int:
    from cudnn_jax.graph.canonical import ordered_tensors

    return next(at for at, other in enumerate(ordered_tensors(graph)) if other is tensor)


# Operands


def test_ragged_offsets_are_operands(planner: Planner) -> None:
    graph = attention(ragged=True)
    offsets = {index_of(graph, t.ragged_offset) for t in graph.tensors if t.ragged_offset is not None}
    uids, _ = lower(planner, graph)
    assert len(offsets) == 3 and offsets < set(uids) and uids == sorted(uids)


def test_numbers_and_what_the_graph_fills_are_no_operands(planner: Planner) -> None:
    graph = pygraph(io_data_type="bfloat16")
    number = graph.scalar(0.5, "float32", rank=3)
    part = graph.slice(graph.tensor((2, 64, 64)), [(0, 2), (0, 32)])
    product = graph.matmul(part, graph.tensor((2, 64, 64)))
    graph.mul(product, number).set_output(True)
    graph.freeze()
    uids, _ = lower(planner, graph)
    assert index_of(graph, number) not in uids and index_of(graph, part) not in uids
    assert uids == sorted(index_of(graph, tensor) for tensor in (*graph.inputs, *graph.outputs))


def test_a_tensor_that_reaches_cudnn_and_no_buffer_is_named(planner: Planner) -> None:
    """The reverse of a buffer that does not reach it, which tests/ffi/test_cudnn_planning.py holds."""
    text = matmul(64, 64, 64).canonical_json()
    assert '"inputs":[0,1]' in text
    with pytest.raises(Refused) as refused:
        planner.ask("lower", key="short", graph=text.replace('"inputs":[0,1]', '"inputs":[0]'), properties=H200)
    assert refused.value.text == "graph.tensors[1]: is asked for by cuDNN and no buffer of the caller"


def test_the_lowered_graph_is_internal() -> None:
    """It is reached through planning alone, and no public name is it."""
    for room in (cudnn_jax, engines, graph_room):
        assert not any("backendgraph" in name.lower().replace("_", "") for name in dir(room)), room
    public = [name for name in dir(cudnn_jax.pygraph) if not name.startswith("_")]
    assert not any("backend" in name or "lower" in name for name in public)


# Layouts


def convolved(stride: tuple[int, ...] | None, between: tuple[int, ...] | None = None) -> tuple[pygraph, Tensor]:
    """A convolution of channels-last images and what follows it; strides of the result and of what lies between."""
    graph = pygraph(io_data_type="bfloat16")
    image = graph.tensor((4, 32, 16, 16), operations.last((4, 32, 16, 16)))
    weight = graph.tensor((64, 32, 3, 3), operations.last((64, 32, 3, 3)))
    y = graph.conv_fprop(image, weight, padding=(1, 1))
    if between:
        y.set_stride(between)
    out = graph.relu(y).set_output(True)
    if stride:
        out.set_stride(stride)
    graph.freeze()
    return graph, y


LAST, FIRST = operations.last((4, 64, 16, 16)), (64 * 256, 256, 16, 1)


def test_what_the_user_left_open_between_nodes_is_not_pushed(planner: Planner) -> None:
    """The graph's own inference is channels last here. It stays at home: cuDNN is told nothing, and infers its own."""
    graph, y = convolved(None)
    at = index_of(graph, y)
    assert y.stride == LAST
    text = graph.canonical_json()
    told = str(list(LAST)).replace(" ", "")
    assert told in text
    # A text that claims another layout for it makes no difference.
    nonsense = text.replace(
        f'"stride":{told},"value":null,"virtual":true', '"stride":[7,7,7,7],"value":null,"virtual":true'
    )
    assert nonsense != text
    planner.ask("lower", key="nonsense", graph=nonsense, properties=H200)
    layouts = planner.ask("layouts", key="nonsense")
    assert layouts[str(at + 1)] == [[4, 64, 16, 16], list(LAST)]


def test_what_the_user_set_is_pushed(planner: Planner) -> None:
    graph, y = convolved(None, between=FIRST)
    _, layouts = lower(planner, graph)
    assert layouts[index_of(graph, y)] == ((4, 64, 16, 16), FIRST)


@pytest.mark.parametrize("stride", [None, LAST])
def test_a_buffer_has_the_layout_that_the_graph_tells(planner: Planner, stride: tuple[int, ...] | None) -> None:
    """A pointwise result is row-major until its user says otherwise; cuDNN by itself would follow the input."""
    graph, _ = convolved(stride)
    (out,) = graph.outputs
    _, layouts = lower(planner, graph)
    assert layouts[index_of(graph, out)] == (out.dim, out.stride) == ((4, 64, 16, 16), stride or FIRST)


@pytest.mark.parametrize("name", ["conv_fprop", "rmsnorm", "layernorm", "instancenorm", "matmul", "reduction"])
def test_the_graphs_inference_is_cudnns(planner: Planner, name: str) -> None:
    """What cuDNN infers for a result between nodes, where it is told nothing, is what the graph tells its user."""
    graph = pygraph(io_data_type="bfloat16")
    made = operations.GRAPHS[name](graph)
    first = made[0] if isinstance(made, tuple) else made
    graph.identity(first).set_output(True)
    graph.freeze()
    _, layouts = lower(planner, graph)
    assert layouts[index_of(graph, first)] == (first.dim, first.stride)


# Other dims of the same bytes


def normalised(stride: tuple[int, ...], *, again: bool = False) -> pygraph:
    graph = pygraph(io_data_type="bfloat16")
    x = graph.tensor((4, 32, 16, 8), stride)
    y = graph.batchnorm_inference(x, *operations._channels(graph, 4)).set_output(True)
    if again:
        graph.add(y, x).set_output(True)
    graph.freeze()
    return graph


def test_a_batch_of_images_is_one_image(planner: Planner) -> None:
    """No operand broadcasts along the first axis then, which cuDNN 9.19 reads wrong."""
    graph = normalised(operations.last((4, 32, 16, 8)))
    uids, layouts = lower(planner, graph)
    for tensor in (graph.inputs[0], *graph.outputs):
        assert layouts[index_of(graph, tensor)] == ((1, 32, 64, 8), (16384, 1, 256, 32))
    assert len(uids) == 6


@pytest.mark.parametrize(
    "graph",
    [normalised((4096, 128, 8, 1)), normalised(operations.last((4, 32, 16, 8)), again=True)],
    ids=["channels first", "read by another node"],
)
def test_images_that_are_no_one_image_are_declined(planner: Planner, graph: pygraph) -> None:
    with pytest.raises(Refused) as refused:
        lower(planner, graph)
    rule = "BATCH_NORM_INFERENCE: the cuDNN backend serves buffers of images with the channels fastest"
    assert refused.value.text == rule


@pytest.mark.parametrize("mode", ["VIEW_ONLY", "LOGICAL"])
def test_a_reshape_between_buffers_is_a_copy(planner: Planner, mode: str) -> None:
    graph = pygraph(io_data_type="bfloat16")
    graph.reshape(graph.tensor((4, 1, 63)), reshape_mode=mode).set_dim((9, 28)).set_output(True)
    graph.freeze()
    _, layouts = lower(planner, graph)
    assert layouts == {0: ((1, 1, 252), (252, 252, 1)), 1: ((1, 1, 252), (252, 252, 1))}


def test_a_reshape_that_moves_elements_is_none(planner: Planner) -> None:
    graph = pygraph(io_data_type="bfloat16")
    graph.reshape(graph.tensor((4, 63), (1, 4)), reshape_mode="LOGICAL").set_dim((9, 28)).set_output(True)
    graph.freeze()
    _, layouts = lower(planner, graph)
    assert layouts[0] == ((4, 63), (1, 4))


# Float8 attention


def float8(name: str, **changes: Any) -> pygraph:
    graph = pygraph(io_data_type="float8_e4m3fn")
    build = getattr(graph, name)
    heads = [operations._heads(graph) for _ in range(3)]
    more = [operations._heads(graph) for _ in range(2)] + [operations._row_stats(graph)] if "backward" in name else []
    scales = operations._scales(graph, 12 if "backward" in name else 6)
    made = build(*heads, *more, *scales, **{"attn_scale": 0.125} | changes)
    for tensor in made:
        if tensor is not None:
            tensor.set_output(True)
    graph.freeze()
    return graph


@pytest.mark.parametrize("name", ["sdpa_fp8", "sdpa_fp8_backward"])
@pytest.mark.parametrize("options", [{}, {"use_causal_mask": True}, {"right_bound": 0}], ids=str)
def test_attention_of_float8_is_planned(planner: Planner, name: str, options: dict[str, Any]) -> None:
    graph = float8(name, **options)
    key = f"float8 {next(_keys)}"
    uids = planner.ask("lower", key=key, graph=graph.canonical_json(), properties=H200)
    form = graph.canonical()
    assert [uid - 1 for uid in uids] == sorted(form["inputs"] + form["outputs"])
    assert planner.ask("create", key=key, mode="A") >= 1


def test_largest_magnitudes_that_nobody_asked_for_are_no_operands(planner: Planner) -> None:
    graph = pygraph(io_data_type="float8_e4m3fn")
    out, _, *largest = operations._attention_fp8(graph)
    out.set_output(True)
    graph.freeze()
    uids, layouts = lower(planner, graph)
    for tensor in largest:
        assert index_of(graph, tensor) not in uids and layouts[index_of(graph, tensor)] == ((1,) * 4, (1,) * 4)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("sdpa_fp8", {"softmax_precision": "bfloat16"}, "SDPA_FP8: the cuDNN backend has no softmax_precision"),
    ("sdpa_fp8_backward", {"attn_scale_prefolded": True}, "SDPA_FP8_BACKWARD: the cuDNN backend has no attn_scale_pre"),
    (
        "sdpa_fp8_backward",
        {"max_total_seq_len_q": 9},
        "SDPA_FP8_BACKWARD: the cuDNN backend has no max_total_seq_len_q",
    ),
    ("sdpa_fp8_backward", {"use_causal_mask_bottom_right": True}, "only supported on Blackwell architecture and newer"),
]


@pytest.mark.parametrize(("name", "options", "words"), REFUSED, ids=str)
def test_what_float8_attention_lacks_is_named(planner: Planner, name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused) as refused:
        lower(planner, float8(name, **options))
    assert words in refused.value.text and "\n" not in refused.value.text
