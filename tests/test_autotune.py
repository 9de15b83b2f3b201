"""`cudnn_jax.autotune`: what it times, what it chooses and keeps, and who runs it afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax import _autotune, _measure
from cudnn_jax._measure import Effort, Timing
from cudnn_jax.engines import cache, manifest, planning, records
from cudnn_jax.engines.base import Inline, PlanConfig
from cudnn_jax.engines.sdpa.engines import SdpaReference
from cudnn_jax.engines.target import CPU
from support import paced, standin

SHAPE = jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.float32)
QKV = [SHAPE] * 3


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDNN_JAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_autotune, "EFFORT", Effort(rounds=4, window_ms=0.5, slow_factor=3.0, slow_rounds=2))
    _forget()
    yield
    _forget()


def _forget() -> None:
    planning.clear_memo()
    records.forget_unkept()
    paced.RAN.clear()


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forward attention with the stand-in in front, the second to last of whose plans is the fastest of all right ones."""
    monkeypatch.setattr(SdpaReference, "build_plan", paced.slow_reference(SdpaReference.build_plan))
    with standin.family(monkeypatch, "sdpa_fwd", paced.SLOT):
        yield


def tuned(fn: Any = cudnn_jax.sdpa, *args: Any, **options: Any) -> list[Any]:
    return list(cudnn_jax.autotune(fn, *(args or QKV), quiet=True, **options).rows)


def runs(fn: Any = cudnn_jax.sdpa, *args: Any) -> tuple[str, str]:
    (row,) = cudnn_jax.explain(fn, *(args or QKV)).rows
    return row["plan"], row["origin"]


def plain(shape: Any = SHAPE.shape) -> list[jax.Array]:
    return [jnp.asarray(x, jnp.float32) for x in np.random.default_rng(0).standard_normal((3, *shape))]


# What is timed and chosen


@pytest.mark.usefixtures("family")
def test_the_fastest_right_plan_is_chosen_and_the_rest_is_told() -> None:
    (row,) = tuned()
    assert (row["ranked"], row["chosen"], row["against"]) == (paced.SLOW, paced.FAST, "xla")
    told = {plan["plan"]: plan for plan in row["plans"]}
    assert {name: plan["verdict"] for name, plan in told.items()} == {
        paced.SLOW: "timed",
        paced.WRONG: "wrong",
        paced.DECLINES: "declined",
        paced.FAST: "timed",
        "xla": "timed",
    }
    assert told[paced.SLOW]["ms"] > 20 and told["xla"]["ms"] > 10 and told[paced.FAST]["ms"] > 1
    assert told[paced.WRONG]["ms"] is None and told[paced.WRONG]["error"] == pytest.approx(1.0)
    assert told[paced.WRONG]["reason"] == "out differs from xla's by 1"
    assert told[paced.DECLINES]["reason"] == "ms -1, serves at least 0"
    assert told[paced.FAST]["error"] < 1e-5 and told["xla"]["error"] == 0
    assert row["declines"] == [["cudnn", "platform cpu, serves cuda"]]
    # Once for the check, in every round, and to estimate.
    assert paced.RAN.count(paced.WRONG) == 1 and paced.RAN.count(paced.SLOW) >= 3


def test_one_plan_is_timed_and_not_recorded(tmp_path: Path) -> None:
    rows = tuned(jax.grad(lambda *qkv: cudnn_jax.sdpa(*qkv).sum(), argnums=(0, 1, 2)))
    assert [(row["operation"], row["chosen"], row["recorded"]) for row in rows] == [
        ("sdpa_fwd", "xla", False),
        ("sdpa_bwd", "xla", False),
    ]
    assert all(row["plans"][0]["ms"] > 0 and "there is one plan only" in row["notes"] for row in rows)
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("family")
def test_operations_are_found_wherever_explain_finds_them() -> None:
    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        carried, _ = jax.lax.scan(lambda c, _: (jax.jit(cudnn_jax.sdpa)(c, k, v), None), q, length=2)
        return jax.lax.cond(True, lambda x: cudnn_jax.sdpa(x, k, v, is_causal=True), lambda x: x, carried).sum()

    for differentiated in (fn, jax.grad(fn)):
        wanted = [(row["operation"], row["count"]) for row in cudnn_jax.explain(differentiated, *QKV).rows]
        assert [(row["operation"], row["count"]) for row in tuned(differentiated)] == wanted
    assert tuned(lambda x: x + 1, SHAPE) == []


def test_calls_that_are_one_graph_are_timed_once() -> None:
    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return cudnn_jax.sdpa(q, k, v) + cudnn_jax.sdpa(q, k, v, deterministic=True)

    assert len(cudnn_jax.explain(fn, *QKV).rows) == 2
    assert [row["count"] for row in tuned(fn)] == [2]


def timings(*rounds: list[float]) -> list[Any]:
    made = [
        _autotune._Trial(PlanConfig(at), lambda: Inline(tuple), timing=Timing(np.array(each)))
        for at, each in enumerate(rounds)
    ]
    return made


@pytest.mark.parametrize(
    ("rounds", "chosen"),
    [
        (([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]), 1),
        (([1.004, 1.004, 1.004], [1.0, 1.0, 1.0]), 0),  # less than 1 %
        (([1.1, 1.5, 0.9], [1.0, 1.0, 1.0]), 0),  # inside the noise
        (([1.1, 2.2, 4.4], [1.0, 2.0, 4.0]), 1),  # a drift that both share is no noise
        (([9.0, 9.0, np.nan], [1.1, 1.1, 1.1], [1.0, 1.0, 1.0]), 2),
    ],
)
def test_a_tie_keeps_the_ranked_order(rounds: Any, chosen: int) -> None:
    fastest = _autotune._fastest(timings(*rounds))
    assert fastest is not None and fastest.plan.engine_id == chosen
    assert _autotune._fastest([]) is None


# Data


class Seen(list[Any]):
    """What the plans are given: the operands of the site, by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        arrays = _autotune._arrays

        def note(site: Any) -> Any:
            made, missing = arrays(site)
            self.append(dict(zip(site.operands, made, strict=False)))
            return made, missing

        monkeypatch.setattr(_autotune, "_arrays", note)


def test_lengths_are_full_and_masks_random_where_only_shapes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, 1, 16, 16), jnp.bool_)
    tuned(lambda *a: cudnn_jax.sdpa(*a[:3], mask=a[4], query_seq_lengths=a[3]), *QKV, lengths, mask)
    (arrays,) = seen
    assert arrays["query_lengths"].tolist() == arrays["key_value_lengths"].tolist() == [16]
    assert 0.3 < arrays["mask"].mean() < 0.7 and 0.8 < arrays["query"].std() < 1.2


def test_arguments_that_reach_an_operation_are_what_it_is_timed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    q, k, v = plain()

    @jax.jit
    def fn(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        attend = jax.checkpoint(lambda k: cudnn_jax.sdpa(q, k, v, key_value_seq_lengths=lengths - 1))
        return jax.lax.cond(True, attend, attend, k * 2)

    tuned(fn, q, k, v, np.array([8]))
    (arrays,) = seen
    assert arrays["key_value_lengths"].tolist() == [7] and arrays["query_lengths"].tolist() == [16]
    np.testing.assert_array_equal(arrays["query"], q)
    assert not np.array_equal(arrays["key"], 2 * k)  # is computed, and random here


def test_a_part_of_an_argument_does_not_stand_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    q, k, v = plain((2, 16, 2, 8))
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("batch",))
    part = jax.sharding.PartitionSpec("batch")

    def looped(lengths: Any) -> Any:
        return jax.lax.scan(lambda c, n: (c, cudnn_jax.sdpa(q, k, v, query_seq_lengths=n)), 0, lengths)

    tuned(looped, np.array([[3, 5]] * 4))
    tuned(jax.shard_map(cudnn_jax.sdpa, mesh=mesh, in_specs=part, out_specs=part), q, k, v)
    in_loop, on_one_device = seen
    assert in_loop["query_lengths"].tolist() == [16, 16]  # unknown, so full
    assert on_one_device["query"].shape == (1, 16, 2, 8)


def test_a_backward_is_timed_with_what_its_forward_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    tuned(jax.grad(lambda *qkv: cudnn_jax.sdpa(*qkv, is_causal=True).sum()))
    _, arrays = seen
    qkv = [arrays[name] for name in ("query", "key", "value")]
    out, lse = cudnn_jax.sdpa(*qkv, is_causal=True, return_residual=True, implementation="xla")
    np.testing.assert_allclose(arrays["out"], out, rtol=1e-6)
    np.testing.assert_allclose(arrays["lse"], jnp.swapaxes(lse, -1, -2), rtol=1e-6)


def test_known_lengths_are_handed_on_inside_of_shard_map() -> None:
    mesh, part = jax.sharding.Mesh(jax.devices()[:1], ("b",)), jax.sharding.PartitionSpec("b")
    fn = jax.shard_map(
        lambda q, k, v: cudnn_jax.sdpa(q, k, v, key_value_seq_lengths=jnp.full(q.shape[:1], 3, jnp.int32)),
        mesh=mesh,
        in_specs=part,
        out_specs=part,
    )
    (row,) = tuned(fn, *plain())
    assert row["chosen"] == "xla" and not [note for note in row["notes"] if "settle" in note]


def test_integers_without_a_known_meaning_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = planning.pygraph(io_data_type="int32")
    a, b = (graph.tensor((4, 4)) for _ in range(2))
    graph.add(a, b).set_output(True)

    def fn(*arrays: Any) -> Any:
        return cudnn_jax.call(graph, *arrays)

    (row,) = tuned(fn, *[jax.ShapeDtypeStruct((4, 4), jnp.int32)] * 2)
    assert row["chosen"] is None and row["notes"][0] == "not timed: give autotune arrays that settle in0, in1"
    assert {plan["verdict"] for plan in row["plans"]} == {"untimed"}
    (row,) = tuned(fn, *[np.ones((4, 4), np.int32)] * 2)
    assert row["chosen"] == "xla" and row["plans"][0]["error"] == 0


def test_a_wrong_program_that_ranks_first_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.register_symbol(tmp_path)
    with standin.family(monkeypatch, "sdpa_fwd", manifest.EngineSlot(1, "mix", ("support.standin", "Mix"))):
        assert runs() == ("mix", "planned here")
        (row,) = tuned()
        assert [(plan["plan"], plan["verdict"]) for plan in row["plans"]] == [("mix", "wrong"), ("xla", "timed")]
        assert (row["ranked"], row["chosen"], row["recorded"]) == ("mix", "xla", True)
        assert runs()[0] == "xla"


@pytest.mark.parametrize("unwritten", [jnp.nan, jnp.inf])
def test_no_error_that_is_no_number_passes(unwritten: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        paced.Paced, "build_plan", lambda self, graph, *_: Inline(lambda q, k, v: (jnp.full(q.shape, unwritten),))
    )
    with standin.family(monkeypatch, "sdpa_fwd", paced.SLOT):
        (row,) = tuned()
    assert row["chosen"] == "xla" and {plan["verdict"] for plan in row["plans"][:-1]} == {"wrong"}
    assert json.loads(json.dumps(row["plans"][0], allow_nan=False))["error"] is None


# What is kept, and who finds it


@pytest.mark.usefixtures("family")
def test_later_traces_run_the_record_and_say_so() -> None:
    assert runs()[0] == paced.SLOW
    fn = jax.jit(cudnn_jax.sdpa)
    fn(*plain())
    (row,) = tuned()
    assert row["recorded"] and row["chosen"] == paced.FAST
    ms = next(plan["ms"] for plan in row["plans"] if plan["plan"] == row["chosen"])
    assert runs() == (row["chosen"], f"autotune record, {ms:.4g} ms")
    assert "(autotune record, " in str(cudnn_jax.explain(cudnn_jax.sdpa, *QKV))
    # A function that was compiled before, a new one, and a call outside of any.
    for call in (fn, jax.jit(lambda *a: cudnn_jax.sdpa(*a)), cudnn_jax.sdpa):
        paced.RAN.clear()
        jax.block_until_ready(call(*plain()))
        assert set(paced.RAN) == {paced.FAST}


def keep(knobs: Any, ms: float = 0.5, **versions: Any) -> records.Record:
    """A record of the graph that `runs` plans, as another process may have written it."""
    graph = _graph()
    record = records.Record(PlanConfig(20_501, tuple(knobs.items()), engine="paced", kind="test"), ms)
    record = records.Record(record.plan, ms, {**record.versions, **versions})
    assert records.keep(graph, CPU, record) is None
    return record


def _graph() -> Any:
    from cudnn_jax._sites import sites

    graph = sites(cudnn_jax.sdpa, *QKV)[0].graph()
    graph.freeze()
    return graph


@pytest.mark.usefixtures("family")
def test_what_was_planned_hides_no_newer_record() -> None:
    assert runs() == (paced.SLOW, "planned here")
    keep({"ms": 1, "wrong": 0})
    assert runs() == (paced.FAST, "autotune record, 0.5 ms")
    keep({"ms": 1, "wrong": 0}, 0.25)
    assert runs() == (paced.FAST, "autotune record, 0.25 ms")
    keep({"ms": 20, "wrong": 0})
    assert runs() == (paced.SLOW, "autotune record, 0.5 ms")


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize(
    ("knobs", "versions", "reason"),
    [
        ({"ms": 1, "wrong": 0}, {"cudnn": 80000}, "cudnn was 80000 and is "),
        ({"ms": 1, "wrong": 0}, {"cudnn_jax": "0.0.1"}, "cudnn_jax was 0.0.1 and is "),
        ({"ms": 7, "wrong": 0}, {}, "paced:ms=7,wrong=0 is no plan of fwd "),
        ({"ms": -1, "wrong": 0}, {}, "ms -1, serves at least 0"),
    ],
)
def test_a_record_that_does_not_hold_is_ignored_with_one_warning(knobs: Any, versions: Any, reason: str) -> None:
    keep(knobs, **versions)
    with pytest.warns(UserWarning, match=r"the autotune record paced:.* of fwd .* is ignored: " + reason) as told:
        assert runs() == (paced.SLOW, "planned here")
    assert len(told) == 1
    planning.clear_memo()
    assert runs() == (paced.SLOW, "planned here")  # a second warning would be an error
    keep({"ms": 1, "wrong": 0})
    assert runs()[0] == paced.FAST


@pytest.mark.usefixtures("family")
def test_an_implementation_that_the_caller_names_wins() -> None:
    keep({"ms": 1, "wrong": 0})
    assert runs(lambda *a: cudnn_jax.sdpa(*a, implementation="paced"))[0] == paced.SLOW
    assert runs(lambda *a: cudnn_jax.sdpa(*a, implementation="xla"))[0] == "xla"


@pytest.mark.usefixtures("family")
def test_no_record_is_made_under_an_implementation(tmp_path: Path) -> None:
    (row,) = tuned(lambda *a: cudnn_jax.sdpa(*a, implementation="paced"))
    assert row["chosen"] == paced.FAST and "xla" not in [plan["plan"] for plan in row["plans"]]
    assert not row["recorded"] and row["notes"] == ["implementation='paced' is asked for"]
    assert runs() == (paced.SLOW, "planned here")


@pytest.mark.usefixtures("family")
def test_without_a_folder_this_process_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    for folder, reason in (("", "there is no cache"), (str(tmp_path / "file"), "file")):
        monkeypatch.setenv("CUDNN_JAX_CACHE_DIR", folder)
        _forget()
        (row,) = tuned()
        assert row["recorded"] and "in this process alone: " in row["notes"][0] and reason in row["notes"][0]
        assert runs()[0] == row["chosen"] == paced.FAST


@pytest.mark.usefixtures("family")
def test_a_record_that_somebody_else_could_write_is_not_read(tmp_path: Path) -> None:
    keep({"ms": 1, "wrong": 0})
    next((tmp_path / "cache").glob("*/records")).chmod(0o777)
    with pytest.warns(UserWarning, match="0777(.|\\n)*CUDNN_JAX_CACHE_DIR names another"):
        assert runs() == (paced.SLOW, "planned here")


PROCESS = """
import json, jax, jax.numpy as jnp, cudnn_jax
from cudnn_jax.engines import manifest
from support.paced import paced_family
manifest.FAMILIES["sdpa_fwd"] = paced_family(manifest.FAMILIES["sdpa_fwd"])
shape = jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.float32)
(row,) = cudnn_jax.explain(cudnn_jax.sdpa, shape, shape, shape).rows
print(json.dumps([row["plan"], row["origin"]]))
"""


@pytest.mark.usefixtures("family")
def test_a_record_with_other_fields_is_none() -> None:
    keep({"ms": 1, "wrong": 0})
    cache_store = cache.cache_store()
    assert cache_store is not None
    key = cache.record_key(_graph(), CPU)
    found = cache_store.load_record(key)
    assert found is not None
    found["plan"].pop("knobs")
    cache_store.store_record(key, found)
    with pytest.warns(UserWarning, match="an autotune record has other fields"):
        assert records.find(_graph(), CPU) is None


@pytest.mark.usefixtures("family")
def test_another_process_runs_the_record() -> None:
    (row,) = tuned()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert tuple(json.loads(done.stdout)) == runs() and runs()[0] == row["chosen"]


# Telling


@pytest.mark.usefixtures("family")
def test_json_and_text_hold_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    result = cudnn_jax.autotune(cudnn_jax.sdpa, *QKV, quiet=True)
    assert json.loads(result.to_json()) == {"target": "cpu", "rows": list(result.rows)}
    text = str(result)
    for word in ("sdpa_fwd, fwd float32", "* chosen, recorded", f"{result.rows[0]['chosen']} *", "wrong: out differs"):
        assert word in text
    assert "no operation of cudnn_jax on cpu" in str(cudnn_jax.autotune(jnp.sin, SHAPE))
    assert capsys.readouterr().err.strip() == ""


def test_a_gpu_that_is_not_here_cannot_be_timed() -> None:
    with pytest.raises(ValueError, match="inside aot.target"), cudnn_jax.aot.target("h200"):
        tuned()


@pytest.mark.usefixtures("family")
def test_without_a_reference_plans_are_compared_with_the_first_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def decline(*_: Any) -> Any:
        raise NotImplementedError("not today")

    monkeypatch.setattr(SdpaReference, "configs", decline)
    (row,) = tuned()
    assert (row["chosen"], row["against"], row["notes"]) == (paced.FAST, paced.SLOW, ["the reference engine declines"])
    assert {plan["plan"]: plan["verdict"] for plan in row["plans"]}[paced.WRONG] == "wrong"


def test_empty_arrays_and_wide_floats_are_compared() -> None:
    assert tuned(cudnn_jax.sdpa, *[jax.ShapeDtypeStruct((0, 16, 2, 8), jnp.float32)] * 3)[0]["chosen"] == "xla"
    with jax.enable_x64(True):
        one = jnp.ones(4, jnp.float64)
        assert _measure.relative_error(one + 1e-12, one) == pytest.approx(1e-12, rel=1e-3)


def test_what_nothing_serves_is_an_error_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(cudnn_jax.GraphNotSupportedError, match="implementation='cudnn'(.|\\n)*platform cpu"):
        tuned(lambda *a: cudnn_jax.sdpa(*a, implementation="cudnn"))
    assert manifest.FAMILIES["sdpa_fwd"].slots[0].name == "xla"
