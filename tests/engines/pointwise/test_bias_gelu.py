"""The bias-GELU engine with no GPU: which graphs it recognises, why it declines others, its settings and programs."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from cudnn_jax import _ffi
from cudnn_jax.engines import cutedsl, ids, manifest, versions
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.pointwise import samples
from cudnn_jax.engines.pointwise.bias_gelu import BiasGelu
from cudnn_jax.engines.pointwise.facts import PointwiseFacts, analyze
from cudnn_jax.engines.target import CPU, Target, named
from cudnn_jax.graph import GraphNotSupportedError, Tensor, data_type

ENGINE = "cutedsl_bias_gelu"
H200 = named("h200")
needs_dsl = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl compiles it")

Build = Callable[[pygraph, Tensor, Tensor, Tensor], Tensor]


def graph_of(build: Build, **options: Any) -> pygraph:
    """`build` with x, bias and residual of (6, 16); its result is an output."""
    graph = pygraph(**{"io_data_type": "bfloat16"} | options)
    build(graph, graph.tensor((6, 16)), graph.tensor((1, 16)), graph.tensor((6, 16))).set_output(True)
    return graph


def facts_of(graph: pygraph) -> PointwiseFacts:
    graph.freeze()
    return analyze(graph)


def found(build: Build) -> BiasGelu:
    facts = facts_of(graph_of(build))
    assert facts.bias_gelu is not None, facts.not_bias_gelu
    return facts.bias_gelu


SPELLINGS: dict[str, tuple[Build, str, set[str]]] = {
    "bias node": (lambda g, x, b, r: g.add(g.gelu(g.bias(x, b)), r), "erf", {"x", "bias", "residual", "out"}),
    "add node": (lambda g, x, b, r: g.add(g.gelu(g.add(x, b)), r), "erf", {"x", "bias", "residual", "out"}),
    "bias first": (lambda g, x, b, r: g.add(g.gelu(g.add(b, x)), r), "erf", {"x", "bias", "residual", "out"}),
    "residual first": (lambda g, x, b, r: g.add(r, g.gelu(g.bias(x, b))), "erf", {"x", "bias", "residual", "out"}),
    "tanh": (
        lambda g, x, b, r: g.add(g.gelu_approx_tanh(g.bias(x, b)), r),
        "tanh",
        {"x", "bias", "residual", "out"},
    ),
    "no bias": (lambda g, x, b, r: g.add(g.gelu(x), r), "erf", {"x", "residual", "out"}),
    "no residual": (lambda g, x, b, r: g.gelu(g.bias(x, b)), "erf", {"x", "bias", "out"}),
    "gelu alone": (lambda g, x, b, r: g.gelu(x), "erf", {"x", "out"}),
    "pre as output": (
        lambda g, x, b, r: g.add(g.gelu(g.bias(x, b).set_output(True)), r),
        "erf",
        {"x", "bias", "residual", "pre", "out"},
    ),
    "x is the residual": (lambda g, x, b, r: g.add(g.gelu(g.bias(x, b)), x), "erf", {"x", "bias", "residual", "out"}),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_recognised(name: str) -> None:
    build, approximation, roles = SPELLINGS[name]
    problem = found(build)
    assert (problem.rows, problem.cols, problem.approximation) == (6, 16, approximation)
    assert set(problem.dtypes) == roles
    assert set(problem.ports) == roles - {"pre", "out"} and set(problem.results) == roles & {"pre", "out"}
    assert problem.scattered == () and problem.inner_types == (data_type.FLOAT,)


def test_roles_are_places_among_the_operands() -> None:
    graph = pygraph(io_data_type="bfloat16")
    residual, bias, x = (graph.tensor(dim) for dim in ((6, 16), (16,), (6, 16)))
    pre = graph.add(bias, x).set_output(True)
    out = graph.add(residual, graph.gelu(pre)).set_output(True)
    problem = facts_of(graph).bias_gelu
    assert problem is not None
    assert [graph.inputs[problem.ports[name]] for name in ("x", "bias", "residual")] == [x, bias, residual]
    assert [graph.outputs[problem.results[name]] for name in ("pre", "out")] == [pre, out]


def test_leading_axes_are_rows() -> None:
    graph = pygraph(io_data_type="float32")
    x, bias = graph.tensor((2, 3, 5, 8)), graph.tensor((8,))
    graph.add(graph.gelu(graph.bias(x, bias)), graph.tensor((2, 3, 5, 8))).set_output(True)
    problem = facts_of(graph).bias_gelu
    assert problem is not None and (problem.rows, problem.cols) == (30, 8)


NOT_IT: dict[str, tuple[Build, str]] = {
    "no gelu": (lambda g, x, b, r: g.add(x, r), "holds 0 gelu nodes"),
    "two gelus": (lambda g, x, b, r: g.gelu(g.gelu(x)), "holds 2 gelu nodes"),
    "more nodes": (lambda g, x, b, r: g.relu(g.add(g.gelu(x), r)), "holds relu as well"),
    "another before": (lambda g, x, b, r: g.add(g.gelu(g.relu(x)), r), "has relu of (6, 16) before the gelu"),
    "a scale before": (lambda g, x, b, r: g.gelu(g.mul(x, b)), "has mul of (6, 16) and (1, 16) before the gelu"),
    "two matrices": (lambda g, x, b, r: g.gelu(g.add(x, r)), "has add of (6, 16) and (6, 16) before the gelu"),
    "another behind": (lambda g, x, b, r: g.mul(g.gelu(x), r), "has mul behind the gelu"),
    "row residual": (lambda g, x, b, r: g.add(g.gelu(x), b), "has residual of (1, 16) beside (6, 16)"),
    "itself": (lambda g, x, b, r: (lambda y: g.add(y, y))(g.gelu(x)), "has residual that is no input"),
    "pre as residual": (
        lambda g, x, b, r: (lambda h: g.add(g.gelu(h), h))(g.bias(x, b)),
        "has residual that is no input",
    ),
    "a number": (lambda g, x, b, r: g.add(g.gelu(x), g.scalar(1.0, rank=2)), "has residual"),
    "gelu as output": (
        lambda g, x, b, r: g.add(g.gelu(x).set_output(True), r),
        "gives the gelu as well",
    ),
}


@pytest.mark.parametrize("name", NOT_IT)
def test_other_graphs_are_told_apart(name: str) -> None:
    build, reason = NOT_IT[name]
    facts = facts_of(graph_of(build))
    assert facts.bias_gelu is None
    assert reason in facts.not_bias_gelu


def declines(graph: pygraph, target: Target = H200) -> list[str]:
    graph.create_execution_plans(target=target, implementation="xla")
    return [decline.reason for decline in graph.declines if decline.engine == ENGINE]


def test_what_the_engine_declines_is_one_line_with_field_value_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutedsl, "available", lambda: None)

    def plain(g: pygraph, x: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return g.add(g.gelu(g.bias(x, b)), r)

    def strided(g: pygraph, x: Tensor, b: Tensor, r: Tensor) -> Tensor:
        x.stride = (1, 6)
        return plain(g, x, b, r)

    def mixed(g: pygraph, x: Tensor, b: Tensor, r: Tensor) -> Tensor:
        b.data_type = data_type.FLOAT
        return plain(g, x, b, r)

    old = dataclasses.replace(H200, sm=75)
    expected: list[tuple[pygraph, Target, str]] = [
        (graph_of(plain), CPU, "platform cpu, serves cuda"),
        (graph_of(plain), old, "architecture sm_75, serves sm_80 to sm_121"),
        (graph_of(NOT_IT["more nodes"][0]), H200, "graph holds relu as well, serves residual + gelu(x + bias)"),
        (graph_of(strided), H200, "layout of x, serves row-major matrices"),
        (graph_of(mixed), H200, "dtypes bfloat16 and float32, serves one for all operands"),
        (
            graph_of(plain, io_data_type="float64"),
            H200,
            "dtype float64, serves bfloat16, float16, float32",
        ),
        (
            graph_of(plain, intermediate_data_type="bfloat16"),
            H200,
            "compute and intermediate types bfloat16, serves float32",
        ),
        (
            graph_of(plain, compute_data_type="bfloat16"),
            H200,
            "compute and intermediate types bfloat16, serves float32",
        ),
        (samples.bias_gelu(0, 16), H200, "0 elements, serves 1 to"),
    ]
    for graph, target, reason in expected:
        (told,) = declines(graph, target)
        assert told.startswith(reason) and "\n" not in told


@pytest.mark.parametrize(
    "installed, reason",
    [(None, "nvidia-cutlass-dsl is not installed"), ("4.7.2", "nvidia-cutlass-dsl 4.7.2, needs 4.8.1 or newer")],
)
def test_a_missing_or_old_dsl_is_a_decline(monkeypatch: pytest.MonkeyPatch, installed: str | None, reason: str) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    (told,) = declines(samples.bias_gelu(6, 16))
    assert reason in told


def test_a_graph_of_pointwise_nodes_alone_is_pointwise() -> None:
    for _, graph in samples.samples():
        family = manifest.family_for(graph)
        assert family is not None and family.name == "pointwise"
    graph = pygraph(io_data_type="float32")
    graph.relu(graph.matmul(graph.tensor((1, 4, 4)), graph.tensor((1, 4, 4)))).set_output(True)
    assert manifest.family_for(graph) is None
    family, slot = manifest.engine_for_id(21_200)
    assert (family.name, slot.name) == ("pointwise", ENGINE)
    assert manifest.engine_for_id(21_200 + ids.REFERENCE_SLOT)[1].name == "xla"


def settings(rows: int, cols: int, sm_count: int = 132, **options: Any) -> list[dict[str, int]]:
    graph = samples.bias_gelu(rows, cols, **options)
    graph.create_execution_plans(target=dataclasses.replace(H200, sm_count=sm_count), implementation=ENGINE)
    return [dict(plan.knobs) for plan in graph.plans]


@needs_dsl
def test_settings_are_concrete_and_fit_the_matrix() -> None:
    large = settings(4096, 4096)
    assert large[0] == {"threads": 256, "vectors": 2, "tail": 1}
    assert len(large) == 4 and all(set(each) == {"threads", "vectors", "tail"} for each in large)
    # A matrix that leaves multiprocessors idle is cut finer, and one of few rows has no more slabs than these give.
    assert settings(64, 4096)[0] == {"threads": 128, "vectors": 1, "tail": 1}
    assert settings(64, 4096, sm_count=8)[0]["vectors"] == 2
    assert {each["vectors"] for each in settings(1, 4096)} == {1}


@needs_dsl
def test_the_polynomial_serves_16_bit_results_of_the_exact_gelu_alone() -> None:
    assert {each["tail"] for each in settings(4096, 4096, dtype="float16")} == {0, 1}
    assert {each["tail"] for each in settings(4096, 4096, dtype="float32")} == {0}
    assert {each["tail"] for each in settings(4096, 4096, approximation="tanh")} == {0}


@needs_dsl
@pytest.mark.parametrize("name", [name for name, _ in samples.samples()])
def test_a_program_is_built_for_a_gpu_that_is_not_there(name: str) -> None:
    graph = dict(samples.samples())[name]
    graph.create_execution_plans(target=H200, implementation="cutedsl")
    assert graph.plans[0].engine == ENGINE
    plan, program = graph.build_plans()
    assert plan == graph.plans[0] and plan.workspace == 0
    seen = _ffi.program_check(program.data)
    assert (seen["platform"], seen["arch"], seen["steps"]) == ("cuda", 90, ["cute"])
    assert seen["cutedsl"] == versions.cutedsl()
    dtypes = {operand["dtype"] for operand in (*seen["inputs"], *seen["outputs"])}
    assert dtypes == {graph.inputs[0].data_type.value}


@needs_dsl
def test_ranking_puts_the_kernel_first_on_cuda_and_the_reference_last() -> None:
    graph = samples.bias_gelu(64, 64)
    graph.create_execution_plans(target=H200)
    engines = [plan.engine for plan in graph.plans]
    assert engines[0] == ENGINE and engines[-1] == "xla"
    on_cpu = samples.bias_gelu(64, 64)
    on_cpu.create_execution_plans(target=CPU)
    assert [plan.engine for plan in on_cpu.plans] == ["xla"]
    with pytest.raises(GraphNotSupportedError, match="cutedsl_bias_gelu: platform cpu"):
        other = samples.bias_gelu(64, 64)
        other.create_execution_plans(target=CPU, implementation="cutedsl")
        other.build_plans()
