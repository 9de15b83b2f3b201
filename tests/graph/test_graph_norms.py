"""Norm nodes: what is inferred, which outputs exist, and what is refused."""

from __future__ import annotations

import pytest

from cudnn_jax.graph import GraphValidationError, data_type, pygraph

N, C, H, W = 2, 3, 4, 5
TRAINING = {"epsilon": 1e-5, "norm_forward_phase": "TRAINING"}


@pytest.fixture
def graph() -> pygraph:
    return pygraph(io_data_type="bfloat16")


def backward(graph: pygraph, dim=(N, C, H, W), weight=(1, C, H, W), kept=(N, 1, 1, 1), **changes):
    ports = {"grad": graph.tensor(dim), "input": graph.tensor(dim), "scale": graph.tensor(weight)}
    ports["inv_variance"] = graph.tensor(kept, data_type="float32")
    ports |= changes
    return graph.rmsnorm_backward(**{name: port for name, port in ports.items() if port is not None})


@pytest.mark.parametrize(
    ("dim", "weight", "kept"),
    [
        ((N, C), (1, C), (N, 1)),
        ((N, C, H, W), (1, C, H, W), (N, 1, 1, 1)),
        ((N, C, H, W), (1, C, 1, 1), (N, 1, H, W)),
        ((N, C, H, W), (1, 1, 1, W), (N, C, H, 1)),
        ((N, C, H, W), (N, 1, 1, W), (1, C, H, 1)),
        ((N, C, 1), (1, C, 1), (N, 1, 1)),
        ((0, C), (1, C), (0, 1)),
        ((N, 1), (1, 1), (N, 1)),
        ((N, 1, 1), (1, 1, 1), (N, 1, 1)),
        ((1,), (1,), (1,)),
        ((2, 3, 4, 5, 6), (1, 1, 1, 5, 6), (2, 3, 4, 1, 1)),
    ],
)
def test_scale_says_which_axes_are_normalised(graph, dim, weight, kept) -> None:
    y, inv_var = graph.rmsnorm(graph.tensor(dim), graph.tensor(weight), **TRAINING)
    assert (y.dim, inv_var.dim, inv_var.data_type) == (dim, kept, data_type.FLOAT)
    dx, d_scale, d_bias = backward(graph, dim, weight, kept)
    assert (dx.dim, d_scale.dim, d_bias.dim) == (dim, weight, weight)
    for tensor in (y, inv_var, dx, d_scale, d_bias):
        tensor.set_output(True)
    graph.freeze()


def test_outputs_follow_the_layout_of_their_inputs(graph) -> None:
    channels_last = (H * W * C, 1, W * C, C)
    x = graph.tensor((N, C, H, W), channels_last)
    y, inv_var = graph.rmsnorm(x, graph.tensor((1, C, 1, 1)), **TRAINING)
    assert y.stride == channels_last
    assert (inv_var.dim, inv_var.stride) == ((N, 1, H, W), (H * W, 1, W, 1))
    scale = graph.tensor((1, C, H, 1), (H * C, 1, C, 1))
    dx, d_scale, d_bias = backward(
        graph, input=x, scale=scale, inv_variance=graph.tensor((N, 1, 1, W), data_type="float32")
    )
    assert dx.stride == channels_last
    assert d_scale.stride == d_bias.stride == scale.stride


def test_without_scale_the_bias_says_which_axes_and_without_weights_it_is_all_but_the_first(graph) -> None:
    y, inv_var = graph.rmsnorm(graph.tensor((N, C, H)), bias=graph.tensor((1, C, 1)), **TRAINING)
    assert (y.dim, inv_var.dim) == ((N, C, H), (N, 1, H))
    y, inv_var = graph.rmsnorm(graph.tensor((N, C, H)), **TRAINING)
    assert (y.dim, inv_var.dim) == ((N, C, H), (N, 1, 1))


def test_without_scale_the_statistics_say_which_axes_the_gradients_run_over(graph) -> None:
    dx, d_scale, d_bias = backward(graph, scale=None, inv_variance=graph.tensor((N, 1, H, W), data_type="float32"))
    assert d_scale is None and "DScale" not in graph.nodes[0].outputs
    assert (dx.dim, d_bias.dim, d_bias.stride) == ((N, C, H, W), (1, C, 1, 1), (C, 1, 1, 1))


@pytest.mark.parametrize(("phase", "exists"), [("TRAINING", True), ("INFERENCE", False), ("inference", False)])
def test_the_statistics_exist_in_training(graph, phase, exists) -> None:
    x, scale = graph.tensor((N, C)), graph.tensor((1, C))
    _, inv_var = graph.rmsnorm(x, scale, epsilon=0.1, norm_forward_phase=phase)
    (node,) = graph.nodes
    assert (inv_var is not None) == exists == ("inv_var" in node.outputs)
    assert (node.type, node.params["norm_forward_phase"]) == ("RMS_NORM", phase.upper())


@pytest.mark.parametrize(
    ("options", "exists"), [({}, True), ({"has_dbias": True}, True), ({"has_dbias": False}, False)]
)
def test_the_bias_gradient_exists_unless_it_is_not_wanted(graph, options, exists) -> None:
    _, _, d_bias = backward(graph, **options)
    (node,) = graph.nodes
    assert (d_bias is not None) == exists == ("DBias" in node.outputs)
    assert node.type == "RMS_NORM_BACKWARD"


def test_epsilon_is_a_number_or_a_tensor_passed_by_value(graph) -> None:
    x, scale, epsilon = graph.tensor((N, C)), graph.tensor((1, C)), graph.scalar(0.25, "float32", rank=2)
    graph.rmsnorm(x, scale, None, 1, "TRAINING")
    graph.rmsnorm(x, scale, epsilon=epsilon, norm_forward_phase="TRAINING")
    number, tensor = graph.nodes
    assert number.params["epsilon"] == 1.0 and "epsilon" not in number.inputs
    assert tensor.params["epsilon"] is None and tensor.inputs["epsilon"] is epsilon


def test_the_canonical_form_holds_what_the_graph_computes() -> None:
    def made(**options):
        graph = pygraph(io_data_type="float32")
        given = TRAINING | options
        for tensor in graph.rmsnorm(graph.tensor((N, C)), graph.tensor((1, C)), **given):
            if tensor is not None:
                tensor.set_output(True)
        return graph

    (node,) = made().canonical()["nodes"]
    assert node["params"] == {"epsilon": 1e-5, "norm_forward_phase": "TRAINING"}
    assert list(node["inputs"]) == ["input", "scale"] and list(node["outputs"]) == ["Y", "inv_var"]
    assert made().hash() == made().hash()
    assert len({made().hash(), made(epsilon=1e-6).hash(), made(norm_forward_phase="INFERENCE").hash()}) == 3


def forward(dim=(N, C, H, W), weight=(1, C, H, W), **changes):
    def build(graph):
        made = {name: graph.tensor(port) if isinstance(port, tuple) else port for name, port in changes.items()}
        scale = graph.tensor(weight) if weight else None
        return graph.rmsnorm(**{"input": graph.tensor(dim), "scale": scale} | TRAINING | made)

    return build


def gradients(**changes):
    def build(graph):
        made = {name: graph.tensor(port, data_type="float32") for name, port in changes.items()}
        return backward(graph, **made)

    return build


def without_scale(graph):
    return backward(graph, scale=None, inv_variance=graph.tensor((N, C, H, W), data_type="float32"))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            forward(weight=(C, H, W)),
            r"rmsnorm: scale has dim \(3, 4, 5\); the rule: the input's dims \(2, 3, 4, 5\) on",
        ),
        (forward(weight=(1, C + 1, 1, 1)), r"scale has dim \(1, 4, 1, 1\); the rule: the input's dims"),
        (forward((N, 0), (1, 0)), r"input has dim \(2, 0\); the rule: normalised axes are at least 1 long"),
        (forward(scale=None, bias=(1, C, 2, 1)), r"bias has dim \(1, 3, 2, 1\); the rule: the input's dims"),
        (forward(bias=(1, C, 1, 1)), r"bias has dim \(1, 3, 1, 1\); the rule: \(1, 3, 4, 5\), the normalised axes"),
        (forward(epsilon=(1, 1, 1, 1)), r"epsilon is .*; the rule: a number, or a tensor passed by value"),
        (forward((N, C), (1, 1)), r"scale has dim \(1, 1\); the rule: at least one axis is normalised, or every axis"),
        (forward((N, 1, H), (1, 1, 1)), r"scale has dim \(1, 1, 1\); the rule: at least one axis is normalised"),
        (forward(scale=None, bias=(1, 1, 1, 1)), r"bias has dim \(1, 1, 1, 1\); the rule: at least one axis"),
        (forward((C,), None), r"input has dim \(3,\); the rule: at least one axis is normalised"),
        (gradients(scale=(1, 1, 1, 1), inv_variance=(N, C, H, W)), r"scale has dim .* at least one axis is normal"),
        (without_scale, r"inv_variance has dim \(2, 3, 4, 5\); the rule: at least one axis is normalised"),
        (forward(epsilon=float("nan")), r"epsilon is nan; the rule: a finite number, at least 0"),
        (forward(epsilon=float("inf")), r"epsilon is inf; the rule: a finite number, at least 0"),
        (forward(epsilon=-1e-5), r"epsilon is -1e-05; the rule: a finite number, at least 0"),
        (lambda graph: forward(epsilon=graph.scalar(-1.0))(graph), r"epsilon is -1.0; the rule: a finite number"),
        (forward(epsilon="small"), r"epsilon is 'small'; the rule: a number"),
        (forward(epsilon=None), r"epsilon is missing; the rule: a tensor or a number"),
        (forward(norm_forward_phase=None), r"norm_forward_phase is missing; the rule: one of 'TRAINING', 'INFERENCE'"),
        (forward(norm_forward_phase="TEST"), r"norm_forward_phase is 'TEST'; the rule: one of"),
        (
            gradients(grad=(N, C, H)),
            r"rmsnorm_backward: grad has dim \(2, 3, 4\); the rule: \(2, 3, 4, 5\), the input's",
        ),
        (
            gradients(inv_variance=(N, 1, H, 1)),
            r"inv_variance has dim .*; the rule: 1 on the normalised axes, the input",
        ),
        (gradients(inv_variance=(N, 1)), r"inv_variance has dim \(2, 1\); the rule: 1 on the normalised axes"),
        (gradients(scale=(C, 1, 1, 1)), r"scale has dim \(3, 1, 1, 1\); the rule: the input's dims"),
    ],
)
def test_a_broken_rule_is_named_at_the_call(graph, build, message) -> None:
    with pytest.raises(GraphValidationError, match=message):
        build(graph)
    assert graph.nodes == ()


def test_statistics_without_scale_of_another_rank_are_refused(graph) -> None:
    with pytest.raises(GraphValidationError, match=r"inv_variance has dim \(2,\); the rule"):
        backward(graph, scale=None, inv_variance=graph.tensor((N,), data_type="float32"))


def test_statistics_are_float32(graph) -> None:
    for tensor in backward(graph, inv_variance=graph.tensor((N, 1, 1, 1))):
        tensor.set_output(True)
    with pytest.raises(GraphValidationError, match=r"inv_variance has data type bfloat16; the rule: float32"):
        graph.validate()
