"""A mask on the cuDNN backend: the derived graph, the bias that `prepare` makes, and what cannot be served so."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax import _ffi
from cudnn_jax.engines import backend, manifest
from cudnn_jax.engines.base import Artifact, BaseEngine, Decline, Inline, PlanConfig
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.program import ProgramBuilder, arguments
from cudnn_jax.engines.sdpa import reference
from cudnn_jax.engines.sdpa.backend_mask import derive
from cudnn_jax.engines.sdpa.facts import analyze
from cudnn_jax.engines.target import CPU, Target, named
from cudnn_jax.graph import GraphNotSupportedError, Tensor, data_type
from support import public, standin, stub_libcuda
from support.attention.harness import CASES, Case, arrays, check, expected

B, N, NK, T, S, D = 2, 4, 2, 6, 8, 16
FULL = (B, N, T, S)
BFLOAT16, FLOAT = data_type.BFLOAT16, data_type.FLOAT


def attention(
    mask: tuple[int, ...] | None = None,
    bias: tuple[int, ...] | None = None,
    *,
    bias_dtype: data_type = BFLOAT16,
    kept: float = 0.0,
    dropped: float = float("-inf"),
    backward: bool = False,
    gradient: bool = False,
    lengths: bool = False,
    out_dtype: data_type = BFLOAT16,
    **options: Any,
) -> pygraph:
    """An attention graph in bfloat16, memory as (B, T, N, D)."""
    graph = pygraph(io_data_type=BFLOAT16)

    def heads(name: str, count: int, length: int) -> Tensor:
        dim, stride = (B, count, length, D), (length * count * D, D, count * D, 1)
        return graph.tensor(dim, stride, BFLOAT16, name)

    ports: dict[str, Any] = {"q": heads("q", N, T), "k": heads("k", NK, S), "v": heads("v", NK, S), **options}
    if bias is not None:
        ports["bias"] = graph.tensor(bias, data_type=bias_dtype, name="bias")
        if gradient:
            ports["dBias"] = graph.tensor(bias, data_type=bias_dtype, name="dBias")
    if mask is not None:
        given = graph.tensor(mask, data_type=data_type.BOOLEAN, name="mask")
        selected = ports.get("bias") or graph.scalar(kept, FLOAT)
        ports["bias"] = graph.binary_select(selected, graph.scalar(dropped, selected.data_type), given)
    if lengths:
        ports |= {f"seq_len_{side}": graph.tensor((B, 1, 1, 1), data_type=data_type.INT32) for side in ("q", "kv")}
        ports["use_padding_mask"] = True
    if backward:
        stats = graph.tensor((B, N, T, 1), data_type=FLOAT, name="stats")
        made = graph.sdpa_backward(**ports, o=heads("o", N, T), dO=heads("dO", N, T), stats=stats)
        made = (*made, *((ports["dBias"],) if gradient else ()))
    else:
        made = graph.sdpa(**ports)
    for tensor in made:
        if tensor is not None:
            tensor.set_output(True)
    if not backward:
        made[0].set_dim((B, N, T, D)).set_stride((T * N * D, D, N * D, 1)).set_data_type(out_dtype)
    graph.freeze()
    return graph


def derived(graph: pygraph) -> Any:
    made = derive(graph, analyze(graph))
    assert made is not None
    return made


# The derived graph

OPTIONS = {
    "plain": {},
    "stats": {"generate_stats": True, "out_dtype": FLOAT},
    "causal": {"use_causal_mask": True, "attn_scale": 0.3},
    "window": {"diagonal_band_left_bound": 3, "diagonal_band_right_bound": 0, "diagonal_alignment": "BOTTOM_RIGHT"},
    "lengths": {"lengths": True},
    "backward": {"backward": True},
    "backward_deterministic": {"backward": True, "use_deterministic_algorithm": True, "lengths": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("mask", [(B, 1, 1, S), (1, N, T, 1), FULL])
def test_a_mask_alone_becomes_a_bias_of_its_shape(mask: tuple[int, ...], options: dict[str, Any]) -> None:
    graph = attention(mask, **options)
    direct = attention(bias=mask, **options)
    assert derived(graph).graph.canonical_json() == direct.canonical_json()
    assert [tensor.dim for tensor in graph.outputs] == [tensor.dim for tensor in direct.outputs]


@pytest.mark.parametrize("bias_dtype", [BFLOAT16, FLOAT])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("mask", "bias"),
    [((B, 1, 1, S), (B, 1, T, S)), ((B, 1, T, S), (1, 1, 1, S)), ((1, 1, T, S), (1, 1, T, S))],
    ids=["bias-is-larger", "mask-is-larger", "same"],
)
def test_a_mask_and_a_bias_become_one_bias_of_the_bias_type(
    mask: tuple[int, ...], bias: tuple[int, ...], backward: bool, bias_dtype: data_type
) -> None:
    graph = attention(mask, bias, bias_dtype=bias_dtype, backward=backward)
    direct = attention(bias=np.broadcast_shapes(mask, bias), bias_dtype=bias_dtype, backward=backward)
    assert derived(graph).graph.canonical_json() == direct.canonical_json()


def test_the_gradient_of_the_bias_is_that_of_the_derived_bias() -> None:
    graph = attention((B, 1, 1, S), FULL, backward=True, gradient=True)
    direct = attention(bias=FULL, backward=True, gradient=True)
    made = derived(graph)
    assert made.graph.canonical_json() == direct.canonical_json()
    facts = analyze(made.graph)
    assert (facts.bias_dim, facts.mask_dim, facts.results) == (FULL, None, analyze(graph).results)


def test_the_note_names_shapes_and_bytes() -> None:
    assert derived(attention((B, 1, 1, S))).notes == ("mask (2, 1, 1, 8) becomes a bias of 32 bytes",)
    both = derived(attention((B, 1, T, S), (1, 1, 1, S), bias_dtype=FLOAT))
    assert both.notes == ("mask (2, 1, 6, 8) and bias (1, 1, 1, 8) become a bias of 384 bytes",)


NO_JAX = """
import sys
from cudnn_jax.engines.sdpa.backend_mask import derive
from cudnn_jax.engines.sdpa.facts import analyze
from cudnn_jax.graph import pygraph
graph = pygraph(io_data_type="bfloat16")
q, k, v = (graph.tensor((2, 4, 8, 16)) for _ in "qkv")
mask = graph.tensor((2, 1, 1, 8), data_type="bool")
bias = graph.binary_select(graph.scalar(0.0, "float32"), graph.scalar(float("-inf"), "float32"), mask)
graph.sdpa(q, k, v, bias=bias)[0].set_output(True)
graph.freeze()
assert derive(graph, analyze(graph)).notes
assert "jax" not in sys.modules
"""


def test_deriving_loads_no_jax() -> None:
    subprocess.run([sys.executable, "-c", NO_JAX], check=True)


def test_other_graphs_are_left_as_they_are() -> None:
    def with_a_node_in_front() -> pygraph:
        graph = pygraph(io_data_type=BFLOAT16)
        q, k, v = (graph.tensor((B, N, S, D)) for _ in "qkv")
        mask = graph.tensor((B, 1, 1, S), data_type=data_type.BOOLEAN)
        bias = graph.binary_select(graph.scalar(0.0, FLOAT), graph.scalar(float("-inf"), FLOAT), mask)
        graph.sdpa(graph.relu(q), k, v, bias=bias)[0].set_output(True)
        return graph

    def with_the_selection_as_output() -> pygraph:
        graph = pygraph(io_data_type=BFLOAT16)
        q, k, v = (graph.tensor((B, N, S, D)) for _ in "qkv")
        mask = graph.tensor((B, 1, 1, S), data_type=data_type.BOOLEAN)
        bias = graph.binary_select(graph.scalar(0.0, FLOAT), graph.scalar(float("-inf"), FLOAT), mask)
        graph.sdpa(q, k, v, bias=bias.set_output(True))[0].set_output(True)
        return graph

    for graph in (
        attention(),
        attention(bias=FULL),
        attention((B, 1, 1, S), kept=1.0),
        attention((B, 1, 1, S), dropped=-1e4),
        with_a_node_in_front(),
        with_the_selection_as_output(),
    ):
        graph.freeze()
        assert derive(graph, analyze(graph)) is None


def test_a_bias_that_broadcasts_has_its_empty_rows_guarded_in_the_backward(rng: np.random.Generator) -> None:
    for graph in (attention(bias=(B, 1, 1, S)), attention(bias=FULL, backward=True)):
        assert derive(graph, analyze(graph)) is None
    graph = attention(bias=(B, 1, 1, S), backward=True)
    made = derived(graph)
    assert (made.graph, made.notes) == (graph, ())
    given = {tensor.name or str(i): _random(tensor, rng) for i, tensor in enumerate(graph.inputs)}
    given["stats"] = given["stats"].at[:, 0].set(-jnp.inf)
    got = made.prepare(*given.values())
    changed = [name for name, array in zip(given, got, strict=True) if array is not given[name]]
    assert changed == ["stats"]
    np.testing.assert_array_equal(got[list(given).index("stats")], given["stats"].at[:, 0].set(1e30))


# The bias


@pytest.mark.parametrize(
    ("mask", "bias", "bias_dtype"),
    [
        ((B, 1, 1, S), None, BFLOAT16),
        ((1, N, T, 1), None, BFLOAT16),
        ((B, 1, 1, S), (B, 1, T, S), FLOAT),
        ((B, 1, T, S), (1, 1, 1, S), BFLOAT16),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_prepare_writes_minus_infinity_where_the_mask_drops(
    mask: tuple[int, ...],
    bias: tuple[int, ...] | None,
    bias_dtype: data_type,
    backward: bool,
    rng: np.random.Generator,
) -> None:
    graph = attention(mask, bias, bias_dtype=bias_dtype, backward=backward, lengths=True)
    made = derived(graph)
    given = {tensor.name or str(at): _random(tensor, rng) for at, tensor in enumerate(graph.inputs)}
    keep = np.asarray(given["mask"])
    zeros = np.zeros(mask, bias_dtype.value)
    want = np.where(keep, np.asarray(given["bias"]) if bias else zeros, zeros.dtype.type(-np.inf))
    if bias:
        # What the mask drops may be anything.
        wide = np.broadcast_to(keep, np.broadcast_shapes(mask, bias))
        seen = wide if wide.shape == bias else wide.any(axis=tuple(i for i in range(4) if bias[i] == 1), keepdims=True)
        given["bias"] = jnp.where(seen, given["bias"], jnp.nan)

    if backward:
        given["stats"] = given["stats"].at[:, :, 2].set(-jnp.inf)
    got = made.prepare(*given.values())
    named = dict(zip([tensor.name or str(i) for i, tensor in enumerate(made.graph.inputs)], got, strict=True))
    at = list(named).index("bias")
    computed = ("mask", "bias", "stats")
    passed = [array for name, array in given.items() if name not in computed]
    assert [id(array) for name, array in named.items() if name not in computed] == [id(array) for array in passed]
    if backward:
        np.testing.assert_array_equal(named["stats"], given["stats"].at[:, :, 2].set(1e30))
    assert (got[at].shape, got[at].dtype) == (made.graph.inputs[at].dim, want.dtype)
    np.testing.assert_array_equal(np.asarray(got[at]).astype(np.float32), want.astype(np.float32))
    assert [array.shape for array in got] == [tensor.dim for tensor in made.graph.inputs]


def _random(tensor: Tensor, rng: np.random.Generator) -> jax.Array:
    drawn = rng.standard_normal(tensor.dim)
    return jnp.asarray(drawn > 0 if tensor.data_type is data_type.BOOLEAN else drawn, tensor.data_type.value)


# Declines


def test_a_combined_shape_larger_than_both_is_declined() -> None:
    graph = attention((B, 1, 1, S), (1, N, T, 1))
    with pytest.raises(GraphNotSupportedError, match=r"mask \(2, 1, 1, 8\) and bias \(1, 4, 6, 1\).*\(2, 4, 6, 8\)"):
        derive(graph, analyze(graph))


def test_a_gradient_of_a_bias_smaller_than_the_mask_is_declined() -> None:
    graph = attention((B, 1, T, S), (1, 1, T, S), backward=True, gradient=True)
    with pytest.raises(GraphNotSupportedError, match=r"gradient of bias \(1, 1, 6, 8\) under mask \(2, 1, 6, 8\)"):
        derive(graph, analyze(graph))
    without = attention((B, 1, T, S), (1, 1, T, S), backward=True)
    assert derived(without).notes


# Planning


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[pygraph]:
    """The graphs that cuDNN is asked for, which it then declines."""
    seen: list[pygraph] = []

    def propose(graph: pygraph, target: Target, *rest: Any) -> Any:
        seen.append(graph)
        return None, [], [Decline("cudnn", "asked")]

    monkeypatch.setattr(backend, "propose", propose)
    return seen


def planned(graph: pygraph, target: Target) -> dict[str, str]:
    graph.create_execution_plans(target=target)
    return {decline.engine: decline.reason for decline in graph.declines}


def test_cudnn_is_asked_for_the_derived_graph_of_a_mask_alone(asked: list[pygraph]) -> None:
    masked, plain = attention((B, 1, 1, S)), attention(bias=(B, 1, 1, S))
    planned(masked, named("h200"))
    planned(plain, named("h200"))
    assert asked[0].hash() == plain.hash() != masked.hash()
    assert asked[1] is plain


def test_another_platform_derives_nothing(asked: list[pygraph]) -> None:
    graphs = [attention((B, 1, 1, S)), attention((B, 1, 1, S), (1, N, T, 1))]
    for graph in graphs:
        assert planned(graph, CPU)["cudnn"] == "platform cpu, serves cuda"
    assert asked == []


def test_a_refused_mask_is_a_decline_of_cudnn_and_asks_nothing(asked: list[pygraph]) -> None:
    reasons = planned(attention((B, 1, 1, S), (1, N, T, 1)), named("h200"))
    assert "combine to (2, 4, 6, 8)" in reasons["cudnn"]
    assert asked == []


def test_limits_and_prefill_judge_the_graph_that_is_asked_for(
    asked: list[pygraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[Any] = []
    monkeypatch.setattr("cudnn_jax.engines.sdpa.backend_limits.mismatch", lambda facts, target: judged.append(facts))
    monkeypatch.setattr("cudnn_jax.engines.sdpa.backend_limits.prefill", lambda facts: judged.append(facts) or {})
    planned(attention((B, 1, 1, S)), named("h200"))
    assert [(facts.bias_dim, facts.mask_dim) for facts in judged] == [((B, 1, 1, S), None)] * 2


# Through `cudnn_jax.sdpa` on the CPU


class DerivedReference(BaseEngine):
    """The reference engine on the derived graph: what cuDNN computes there."""

    name = "derived"
    kind = "test"

    def configs(self, graph: Any, facts: Any, target: Target) -> Sequence[tuple[tuple[str, int], ...]]:
        if derive(graph, facts) is None:
            raise GraphNotSupportedError("no mask")
        return [()]

    def build_plan(self, graph: Any, facts: Any, config: PlanConfig, target: Target) -> Artifact:
        made = derived(graph)
        make = reference.forward if facts.direction == "fwd" else reference.backward
        run = make(analyze(made.graph), target.platform)
        return Inline(lambda *given: run(*made.prepare(*given)))


MASKED = [case for case in CASES if case.mask]


@pytest.mark.parametrize("case", MASKED, ids=str)
def test_the_derived_graph_means_what_the_graph_means(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = manifest.EngineSlot(1, "derived", (__name__, "DerivedReference"))
    given = arrays(case)
    with standin.family(monkeypatch, "sdpa_fwd", slot), standin.family(monkeypatch, "sdpa_bwd", slot):
        ran = cudnn_jax.explain(public.traced(case), given).engines()
        check(case, public.run(case, given), expected(case, given))
    combined = np.broadcast_shapes(case.shape_of(case.mask), case.shape_of(case.bias or "1111"))
    fits = combined in (case.shape_of(case.mask), case.shape_of(case.bias))
    assert ran["sdpa_fwd"] == ("derived" if fits else "xla")
    gradient = not case.bias or combined == case.shape_of(case.bias)
    assert ran["sdpa_bwd"] == ("derived" if gradient else "xla")


SYMBOL = "backend_mask_add"
SOURCE = r"""
#include <stdint.h>
/* out = q + bias, the bias repeated, and -1000 for what it drops. */
void backend_mask_add(void* const* args, const int64_t* nbytes, int64_t n) {
  const float *q = args[0], *bias = args[1];
  float* out = args[2];
  (void)n;
  for (int64_t i = 0; i < nbytes[2] / 4; ++i) {
    const float b = bias[i % (nbytes[1] / 4)];
    out[i] = q[i] + (b < -1e30f ? -1000 : b);
  }
}
"""


class Add(BaseEngine):
    """Forward graphs with a mask, by a program of the derived graph."""

    name = "add"
    kind = "test"

    def configs(self, graph: Any, facts: Any, target: Target) -> Sequence[tuple[tuple[str, int], ...]]:
        return [()]

    def build_plan(self, graph: Any, facts: Any, config: PlanConfig, target: Target) -> Artifact:
        made = derived(graph)
        (node,) = made.graph.canonical()["nodes"]
        order = [node["inputs"]["q"], node["inputs"]["bias"], node["outputs"]["O"]]
        builder = ProgramBuilder(made.graph, target)
        builder.step("host", symbol=SYMBOL, args=arguments(made.graph, order))
        return made.attach(builder.build())


def compiled(folder: Path, name: str, source: Path | str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the tests need a C compiler"
    if isinstance(source, str):
        (folder / "source.c").write_text(source)
        source = folder / "source.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", folder / name, source, "-ldl"], check=True)
    return folder / name


@pytest.fixture(scope="module")
def host_function(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    loaded = ctypes.CDLL(str(compiled(tmp_path_factory.mktemp("host"), "add.so", SOURCE)))
    address = ctypes.cast(loaded.backend_mask_add, ctypes.c_void_p).value
    assert address is not None
    _ffi.register_host_symbol(SYMBOL, address)
    yield


@pytest.fixture
def add(host_function: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with standin.family(monkeypatch, "sdpa_fwd", manifest.EngineSlot(1, "add", (__name__, "Add"))):
        yield
    jax.clear_caches()


def added(q: jax.Array, mask: jax.Array, bias: jax.Array | None = None) -> np.ndarray:
    drawn = np.zeros(mask.shape, np.float32) if bias is None else np.asarray(bias)
    row = np.where(np.asarray(mask), drawn, -1000).ravel()
    return np.asarray(q) + np.resize(row, q.size).reshape(q.shape)


def test_a_program_takes_what_prepare_makes(add: None, rng: np.random.Generator) -> None:
    q, k = (jnp.asarray(rng.standard_normal((2, n, 3, 8)), jnp.float32) for n in (5, 7))
    mask = jnp.asarray(rng.random((2, 1, 1, 7)) < 0.5)
    bias = jnp.asarray(rng.standard_normal((2, 1, 5, 7)), jnp.float32)

    def call(q: jax.Array, mask: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        return cudnn_jax.sdpa(q, k, k, bias, mask)

    (row,) = cudnn_jax.explain(call, q, mask).rows
    assert (row["plan"], row["artifact"]) == ("add", "program")
    assert row["notes"] == ["mask (2, 1, 1, 7) becomes a bias of 56 bytes"]
    before = _ffi.counters()["executions"]
    np.testing.assert_allclose(jax.jit(call)(q, mask), added(q, mask), rtol=1e-6)
    np.testing.assert_allclose(call(q, mask, bias), added(q, mask, bias), rtol=1e-6)
    assert _ffi.counters()["executions"] == before + 2
    masks = jnp.stack([mask, ~mask])
    got = jax.vmap(call, (None, 0))(q, masks)
    np.testing.assert_allclose(got, added(jnp.stack([q, q]), masks), rtol=1e-6)
    scanned, _ = jax.lax.scan(lambda carry, each: (call(carry, each), None), q, masks)
    np.testing.assert_allclose(scanned, added(added(q, mask), ~mask), rtol=1e-6)


# Planned by cuDNN for a GPU that is not here

CHILD = """
import json, re
import jax, jax.numpy as jnp
import msgpack
from jax import export
import cudnn_jax

def aval(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)

bf16 = jnp.bfloat16
q, k = aval(bf16, 2, 192, 4, 64), aval(bf16, 2, 128, 2, 64)
row, wide = aval(jnp.bool_, 2, 1, 1, 128), aval(jnp.bool_, 2, 1, 192, 128)
wide_bias, full = aval(bf16, 2, 1, 192, 128), aval(bf16, 2, 4, 192, 128)
shared, column = aval(bf16, 1, 1, 192, 128), aval(bf16, 1, 4, 192, 1)

def fixed(q, k, v, bias, mask):
    out, pullback = jax.vjp(lambda *x: cudnn_jax.sdpa(*x, bias, mask), q, k, v)
    return pullback(out)

def trained(q, k, v, bias, mask):
    out, pullback = jax.vjp(lambda *x: cudnn_jax.sdpa(*x, mask), q, k, v, bias)
    return pullback(out)

CASES = {
    "none": (fixed, None, None),
    "bias": (fixed, wide_bias, None),
    "mask": (fixed, None, wide),
    "padding mask": (fixed, None, row),
    "trained bias": (trained, full, None),
    "trained bias and mask": (trained, full, row),
    "trained bias, wider mask": (trained, shared, wide),
    "larger than both": (fixed, column, row),
}
def program(line):
    # Without the bytes of cuDNN's plans: they hold memory that cuDNN never wrote.
    packed = bytes.fromhex(re.search(r'program = dense<"0x([^"]*)">', line)[1])
    payload = msgpack.unpackb(msgpack.unpackb(packed)["payload"])
    for step in payload["steps"]:
        step.pop("plan", None)
    return payload

checks = [export.DisabledSafetyCheck.custom_call("cudnn_jax.program")]
told = {}
with cudnn_jax.aot.target("h200"):
    for name, (fn, bias, mask) in CASES.items():
        rows = cudnn_jax.explain(fn, q, k, k, bias, mask).rows
        text = export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=checks)(q, k, k, bias, mask).mlir_module()
        calls = [line for line in text.splitlines() if "@cudnn_jax.program" in line]
        told[name] = {
            "rows": {each["operation"]: dict(each) for each in rows},
            "programs": [program(line) for line in calls],
            "operands": [re.findall(r"tensor<([^>]*)>", line.split(" : (")[1].split(") -> ")[0]) for line in calls],
            "arguments": [re.search(r"@cudnn_jax.program\\(([^)]*)\\)", line)[1].split(", ") for line in calls],
        }
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process with the stub driver plans and lowers for the H200."""
    stub_libcuda.wheels()
    answer = stub_libcuda.told_by(CHILD, stub_libcuda.build(tmp_path_factory.mktemp("stub")), timeout=300)
    plain = answer["none"]["rows"]["sdpa_fwd"]
    assert plain["engine"] == "cudnn", plain["declines"]
    return answer


def test_cudnn_serves_a_mask_and_says_what_it_copies(told: dict[str, Any]) -> None:
    for name, note in (
        ("mask", "mask (2, 1, 192, 128) becomes a bias of 98304 bytes"),
        ("trained bias and mask", "mask (2, 1, 1, 128) and bias (2, 4, 192, 128) become a bias of 393216 bytes"),
    ):
        for operation in ("sdpa_fwd", "sdpa_bwd"):
            row = told[name]["rows"][operation]
            assert (row["engine"], row["notes"]) == ("cudnn", [note])
    for operation in ("sdpa_fwd", "sdpa_bwd"):
        assert told["bias"]["rows"][operation]["notes"] == []


def test_a_program_of_a_mask_is_the_program_of_that_bias(told: dict[str, Any]) -> None:
    for masked, direct in (("mask", "bias"), ("trained bias and mask", "trained bias")):
        assert len(told[masked]["programs"]) == 2
        assert told[masked]["programs"] == told[direct]["programs"]


def test_the_custom_call_takes_the_bias_and_the_other_operands_untouched(told: dict[str, Any]) -> None:
    heads = ["2x192x4x64xbf16", "2x128x2x64xbf16", "2x128x2x64xbf16"]
    residuals = ["2x192x4x64xbf16", "2x192x4x64xbf16", "2x4x192x1xf32"]
    for name, bias in (("mask", "2x1x192x128xbf16"), ("trained bias and mask", "2x4x192x128xbf16")):
        forward, backward = told[name]["operands"]
        assert forward == [*heads, bias]
        assert backward == [*heads, *residuals, bias]
        for arguments_of_call in told[name]["arguments"]:
            assert arguments_of_call[:3] == ["%arg0", "%arg1", "%arg2"]
            assert not arguments_of_call[-1].startswith("%arg")


def test_cudnn_says_why_it_does_not_serve_a_mask(told: dict[str, Any]) -> None:
    rows = told["padding mask"]["rows"]
    assert rows["sdpa_fwd"]["engine"] == "cudnn"
    assert rows["sdpa_bwd"]["declines"] == [["cudnn", "backward of a bias (2, 1, 1, 128), serves a query axis of 192"]]
    rows = told["trained bias, wider mask"]["rows"]
    assert rows["sdpa_fwd"]["engine"] == "cudnn"
    assert rows["sdpa_bwd"]["engine"] == "xla"
    ((engine, reason),) = rows["sdpa_bwd"]["declines"]
    assert engine == "cudnn"
    assert "bias (1, 1, 192, 128) under mask (2, 1, 192, 128)" in reason
    for row in told["larger than both"]["rows"].values():
        assert row["engine"] == "xla"
        assert "mask (2, 1, 1, 128) and bias (1, 4, 192, 1)" in row["declines"][0][1]
