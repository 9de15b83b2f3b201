"""The cuTile RMS norm without a GPU: what it declines, and what its programs compute when NumPy runs their kernels."""

from __future__ import annotations

import dataclasses

import pytest

from cudnn_jax import _ffi
from cudnn_jax.engines import cutile, planning
from cudnn_jax.engines.base import Program
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import Target, named
from cudnn_jax.graph import GraphNotSupportedError, data_type
from gpu.ahead import fill
from gpu.norm_programs import implementations
from support import cutile_numpy
from support.norms import Case

H200 = named("h200")
SMALL = dataclasses.replace(H200, sm_count=3)
"""Few multiprocessors, so that small graphs have several tiles for each block."""

CASES = [
    Case((1, 1), (1,), bias=True),
    Case((37, 5), (1,), bias=True),
    Case((300, 16), (1,), "bfloat16", bias=True),
    Case((33, 129), (1,), "float16", "float32"),
    Case((19, 1000), (1,), "bfloat16", "float32", bias=True),
    Case((7, 2048), (1,), "float16", bias=True),
    Case((11, 2500), (1,), "float32"),
    Case((2, 3, 4, 1030), (2, 3), "bfloat16", bias=True, statistics=False),
    Case((5, 9000), (1,), "bfloat16"),
    Case((3, 12000), (1,), "bfloat16"),
    Case((2, 3, 6, 4), (2, 3), "float32", scale=False, bias=True),
    Case((2, 9, 4), (1, 2), "bfloat16", scale=False),
    Case((2, 3, 3001), (2,), "float16", epsilon=2.0),
]


def plans(graph: pygraph, target: Target = SMALL) -> pygraph:
    graph.create_execution_plans(target=target, implementation="cutile_rmsnorm")
    return graph


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_setting_computes_the_norm(case, direction, rng, monkeypatch) -> None:
    drawn = case.draw(rng)
    arrays = getattr(case, f"{direction}_inputs")(drawn)
    with cutile_numpy.uncompiled(monkeypatch) as known:
        graph = plans(getattr(case, direction)())
        assert 1 <= len(graph.plans) <= 4
        for at in range(len(graph.plans)):
            graph.select_plan(at)
            _, program = graph.build_plans()
            got = cutile_numpy.run(program, known, arrays)
            case.check(getattr(case, f"{direction}_names"), got, drawn)


def test_the_order_of_axes_in_memory_is_the_kernels(rng, monkeypatch) -> None:
    """(N, C, H, W) with C fastest, normalised over C, is rows of C."""
    case = Case((2, 5, 3, 4), (1,), bias=True)
    graph = pygraph(io_data_type="float32")
    x = graph.tensor(case.dim, (60, 1, 20, 5))
    made = graph.rmsnorm(x, graph.tensor((1, 5, 1, 1)), graph.tensor((1, 5, 1, 1)), case.epsilon, "TRAINING")
    for tensor in made:
        tensor.set_output(True)
    drawn = case.draw(rng)
    last = (0, 2, 3, 1)
    arrays = [drawn["x"].transpose(last).copy(), *(drawn[name].transpose(last).copy() for name in ("scale", "bias"))]
    with cutile_numpy.uncompiled(monkeypatch) as known:
        _, program = plans(graph).build_plans()
        stored = [tuple(each["shape"]) for each in _ffi.program_check(program.data)["inputs"]]
        arrays = [array.reshape(shape) for array, shape in zip(arrays, stored, strict=True)]
        y, inv_var = cutile_numpy.run(program, known, arrays)
    case.check(["Y", "inv_var"], [y.transpose(0, 3, 1, 2), inv_var.reshape(case.statistics_dim)], drawn)


def refused(graph: pygraph, target: Target = H200) -> str:
    graph.create_execution_plans(target=target)
    assert "cutile" not in {plan.kind for plan in graph.plans}
    assert graph.plans[-1].engine == "xla"
    (reason,) = [decline.reason for decline in graph.declines if decline.engine == "cutile_rmsnorm"]
    return reason


def strided() -> pygraph:
    graph = pygraph(io_data_type="bfloat16")
    y, _ = graph.rmsnorm(
        graph.tensor((4, 8), (1, 4)), graph.tensor((1, 8)), epsilon=0.0, norm_forward_phase="INFERENCE"
    )
    y.set_output(True)
    return graph


def behind_relu() -> pygraph:
    graph = pygraph(io_data_type="bfloat16")
    x = graph.relu(graph.tensor((4, 8)))
    y, _ = graph.rmsnorm(x, graph.tensor((1, 8)), epsilon=0.0, norm_forward_phase="INFERENCE")
    y.set_output(True)
    return graph


def without_dx() -> pygraph:
    graph = pygraph(io_data_type="bfloat16")
    statistics = graph.tensor((4, 1), data_type="float32")
    made = graph.rmsnorm_backward(graph.tensor((4, 8)), graph.tensor((4, 8)), graph.tensor((1, 8)), statistics)
    made[1].set_output(True)
    return graph


def in_float64() -> pygraph:
    graph = pygraph(io_data_type="bfloat16", compute_data_type="float64")
    made = graph.rmsnorm(graph.tensor((4, 8)), graph.tensor((1, 8)), epsilon=0.0, norm_forward_phase="INFERENCE")
    made[0].set_output(True)
    return graph


SIMPLE = Case((4, 8), (1,), "bfloat16")


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (lambda: Case((4, 8), (1,), "float64").forward(), "input dtype float64, serves bfloat16, float16, float32"),
        (lambda: Case((4, 8), (1,), "bfloat16", "float64").forward(), "scale dtype float64, serves"),
        (strided, "memory of input is not rows of the normalised axes, serves row-major"),
        (lambda: Case((4, 8), (0,)).forward(), "memory of input is not rows"),
        (lambda: Case((2, 3, 4), (1,)).backward(), "memory of input is not rows"),
        (lambda: Case((0, 8), (1,)).forward(), "rows 0, serves 1 to 2147483647"),
        (lambda: Case((4, 16385), (1,)).forward(), "cols 16385, serves at most 16384"),
        (lambda: Case((4, 16385), (1,), "bfloat16").backward(), "cols 16385, serves at most 16384"),
        (lambda: Case((4, 12289), (1,), "bfloat16", bias=True).backward(), "cols 12289, serves at most 12288"),
        (lambda: Case((4, 12289), (1,), "float32").backward(), "cols 12289, serves at most 12288"),
        (in_float64, "compute type float64, serves float32"),
        (without_dx, "DX is not an output, serves graphs that give it"),
    ],
)
def test_a_decline_names_field_value_and_limit(graph, reason) -> None:
    assert refused(graph()).startswith(reason)


def test_a_graph_around_the_norm_is_declined() -> None:
    graph = behind_relu()
    graph.create_execution_plans(target=H200)
    reasons = {decline.engine: decline.reason for decline in graph.declines}
    assert reasons["cutile_rmsnorm"] == "graph has POINTWISE, port input as a number, serves the norm alone"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (dataclasses.replace(H200, sm=75), "architecture sm_75, serves sm_80 to sm_129"),
        (dataclasses.replace(H200, sm=128), "cutile: architecture sm_128, compiles for sm_80, sm_86"),
        (Target("rocm"), "platform rocm, serves cuda"),
    ],
)
def test_a_target_out_of_reach_is_declined(target, reason) -> None:
    assert refused(SIMPLE.forward(), target).startswith(reason)


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"cuda-tile": "1.6.9"}, "cuda-tile 1.6.9, at least 1.7 is needed"),
        ({"nvidia-cuda-tileiras": "13.3.1"}, "nvidia-cuda-tileiras 13.3.1, at least 13.4 is needed"),
        ({"nvidia-nvvm": None}, "nvidia-nvvm is not installed; the extra cutile brings it"),
        (
            {"nvidia-nvvm": "13.9.0"},
            "nvidia-cuda-tileiras 13.4.0, nvidia-cuda-nvcc 13.4.0, nvidia-nvvm 13.9.0; the rule: one release",
        ),
    ],
)
def test_a_compiler_that_cannot_serve_is_declined_with_its_version(versions, reason, monkeypatch) -> None:
    installed = {name: "13.4.0" for name in ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")}
    installed |= {"cuda-tile": "1.7.0"} | versions

    def version(name):
        if installed[name] is None:
            raise cutile.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(cutile.importlib.metadata, "version", version)
    assert refused(SIMPLE.forward()) == reason


def test_without_the_dsl_the_reason_names_the_extra(monkeypatch) -> None:
    find = cutile.importlib.util.find_spec
    monkeypatch.setattr(cutile.importlib.util, "find_spec", lambda name: None if name == "cuda.tile" else find(name))
    assert refused(SIMPLE.forward()) == "cuda-tile is not installed; the extra cutile brings it"


def test_a_compiler_that_cutile_would_not_find_is_declined(monkeypatch, tmp_path) -> None:
    first = cutile._first_folder
    monkeypatch.setattr(cutile, "_first_folder", lambda name: str(tmp_path) if name == "nvidia.cu13" else first(name))
    assert refused(SIMPLE.forward()) == f"tileiras is not under {tmp_path}, the first folder of the package nvidia.cu13"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_h200_that_is_not_there_gets_a_program(direction) -> None:
    case = Case((64, 256), (1,), "bfloat16", bias=True)
    planned = planning.plan(getattr(case, direction)(), H200, "cutile")
    assert isinstance(planned.artifact, Program) and planned.plan.kind == "cutile"
    told = _ffi.program_check(planned.artifact.data)
    assert (told["platform"], told["arch"], told["cudnn"]) == ("cuda", 90, None)
    assert told["steps"] == (["cubin"] if direction == "forward" else ["cubin"] * 3)
    sums = 2 * 64 * 256 * 4
    assert told["workspace"] == (0 if direction == "forward" else sums)


def test_a_folder_of_programs_serves_where_there_is_no_compiler(tmp_path, monkeypatch) -> None:
    (name, *_) = implementations(SIMPLE.forward())
    assert fill(tmp_path, H200, iter([(SIMPLE.forward(), name)])) == 1
    built = planning.plan(SIMPLE.forward(), H200, name).artifact

    def refuse() -> None:
        raise ImportError("no compiler here")

    monkeypatch.setattr(cutile, "available", refuse)
    planning.clear_memo()
    with pytest.raises(GraphNotSupportedError, match="no compiler here"):
        planning.plan(SIMPLE.forward(), H200, name)
    monkeypatch.setenv("CUDNN_JAX_PROGRAMS", str(tmp_path))
    assert planning.plan(SIMPLE.forward(), H200, name).artifact.data == built.data
    planning.clear_memo()


def test_the_dsl_engine_leads_and_the_reference_is_last() -> None:
    graph = SIMPLE.forward()
    graph.create_execution_plans(target=H200)
    kinds = [plan.kind for plan in graph.plans]
    assert kinds[0] == "cutile" and kinds[-1] == "xla"


def test_statistics_outside_of_the_outputs_are_not_written() -> None:
    graph = pygraph(io_data_type=data_type.BFLOAT16)
    y, _ = graph.rmsnorm(graph.tensor((4, 8)), graph.tensor((1, 8)), epsilon=0.0, norm_forward_phase="TRAINING")
    y.set_output(True)
    _, program = plans(graph, H200).build_plans()
    assert len(_ffi.program_check(program.data)["outputs"]) == 1
