"""Plans that a process finds instead of making them: keys, folders, and a second process that asks nobody."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import platformdirs
import pytest

import cudnn_jax
from cudnn_jax.engines import cache, manifest, planning, records
from cudnn_jax.engines.base import PlanConfig, TransientDecline
from cudnn_jax.engines.store import Store, Stored
from cudnn_jax.engines.target import CPU, Target, named
from support import paced, standin, stub_libcuda
from support.stub_libcuda import stub_folder as stub_folder

H200 = named("h200")
QUERY = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDNN_JAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDNN_JAX_PROGRAMS", raising=False)
    planning.clear_memo()
    records.forget_unkept()
    yield
    planning.clear_memo()


def graph(scale: float = 0.5) -> planning.pygraph:
    made = planning.pygraph(io_data_type="bfloat16")
    q, k, v = (made.tensor((2, 4, 64, 64), name=name) for name in "qkv")
    out, _ = made.sdpa(q=q, k=k, v=v, attn_scale=scale, generate_stats=False)
    out.set_output(True)
    made.freeze()
    return made


def load(made: planning.pygraph) -> Stored:
    ((stored, _),) = cache.found(made, H200, None)
    return stored


def fail(*_: Any, **__: Any) -> Any:
    raise AssertionError("planned again")


def test_a_second_plan_of_one_graph_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    first = planning.plan(graph(), H200)
    planning.clear_memo()
    monkeypatch.setattr(planning, "Planner", fail)
    second = planning.plan(graph(), H200)
    assert (second.plan, second.plans, second.declines) == (first.plan, first.plans, first.declines)
    assert second.subject == first.subject and second.family == first.family
    assert (first.origin, second.origin) == ("planned here", "cache")
    with pytest.raises(AssertionError, match="planned again"):
        planning.plan(graph(0.25), H200)
    planning.clear_memo()
    with pytest.raises(AssertionError, match="planned again"):
        planning.plan(graph(), H200, "xla")


def test_the_cpu_and_an_empty_folder_name_keep_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planning.plan(graph(), CPU)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("CUDNN_JAX_CACHE_DIR", "")
    planning.plan(graph(), H200)
    assert cache.cache_store() is None and not (tmp_path / "cache").exists()


def test_keys_tell_apart_what_a_plan_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = graph()
    other = dataclasses.replace(H200, device_kind="another GPU")
    portable = {
        cache.portable_key(plain, H200, None),
        cache.portable_key(graph(0.25), H200, None),
        cache.portable_key(plain, other, None),
        cache.portable_key(plain, H200, "cudnn"),
    }
    assert len(portable) == 4
    # The same GPU, whether it is here or described.
    here = dataclasses.replace(H200, ordinal=0, properties=None)
    assert cache.portable_key(plain, here, None) in portable
    first = cache.local_key(plain, H200, None)
    versions = cache.versions_here()
    for name in versions:
        monkeypatch.setattr(cache, "versions_here", lambda name=name: {**versions, name: "another"})
        assert cache.local_key(plain, H200, None) != first, name
        assert cache.portable_key(plain, H200, None) in portable


def test_an_opt_in_makes_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = manifest.EngineSlot(7, "new", ("support.standin", "Mix"), opt_in="CUDNN_JAX_TEST_NEW")
    old = manifest.FAMILIES["sdpa_fwd"]
    monkeypatch.setitem(manifest.FAMILIES, "sdpa_fwd", dataclasses.replace(old, slots=(slot, *old.slots)))
    off = cache.local_key(graph(), H200, None)
    monkeypatch.setenv("CUDNN_JAX_TEST_NEW", "1")
    assert cache.local_key(graph(), H200, None) != off


def test_the_backends_opt_in_is_part_of_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    off, held = cache.local_key(graph(), H200, None), planning.plan(graph(), CPU)
    assert planning.plan(graph(), CPU) is held
    monkeypatch.setenv("CUDNN_JAX_CUDNN_UNPROVEN", "1")
    assert cache.local_key(graph(), H200, None) != off
    assert planning.plan(graph(), CPU) is not held


@pytest.mark.parametrize("variable", ["CUTE_DSL_LINEINFO", "CUDA_TILE_LOGS"])
def test_a_variable_of_a_dsl_makes_another_key(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.local_key(graph(), H200, None)
    monkeypatch.setenv(variable, "1")
    assert cache.local_key(graph(), H200, None) != before


def test_programs_made_ahead_of_time_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = planning.plan(graph(), H200)
    marked = dataclasses.replace(load(graph()), declines=(), release="0.0.1")
    Store(tmp_path / "ahead").store(cache.portable_key(graph(), H200, None), marked)
    monkeypatch.setenv("CUDNN_JAX_PROGRAMS", str(tmp_path / "ahead"))
    planning.clear_memo()
    ahead = planning.plan(graph(), H200)
    assert planned.declines and ahead.declines == ()
    assert (planned.origin, ahead.origin) == ("planned here", "CUDNN_JAX_PROGRAMS, made by cudnn_jax 0.0.1")


@pytest.mark.parametrize("inner", ["", "v2", "v2/plans"])
def test_programs_that_somebody_else_could_write_are_not_read(
    inner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning.plan(graph(), H200)
    folder = tmp_path / "ahead"
    Store(folder).store(cache.portable_key(graph(), H200, None), load(graph()))
    monkeypatch.setenv("CUDNN_JAX_PROGRAMS", str(folder))
    planning.clear_memo()
    assert planning.plan(graph(), H200).origin.startswith("CUDNN_JAX_PROGRAMS")
    (folder / inner).chmod(0o777)
    planning.clear_memo()
    with pytest.raises(PermissionError, match="0777, the rule is writable by its owner alone"):
        planning.plan(graph(), H200)


def test_a_folder_of_programs_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNN_JAX_PROGRAMS", str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match="absent"):
        planning.plan(graph(), H200)


def test_a_cache_of_somebody_else_is_said_once_and_planning_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning.plan(graph(), H200)
    (tmp_path / "cache" / "v2" / "plans").chmod(0o777)
    planning.clear_memo()
    with pytest.warns(UserWarning, match="0777(.|\\n)*CUDNN_JAX_CACHE_DIR names another"):
        assert planning.plan(graph(), H200).origin == "planned here"
    planning.clear_memo()
    planning.plan(graph(), H200)  # a second warning would be an error


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CUDNN_JAX_CACHE_DIR", str(tmp_path / "file"))
    assert planning.plan(graph(), H200).origin == "planned here"
    with pytest.raises(OSError, match="file"):
        cudnn_jax.aot.build(lambda q: cudnn_jax.sdpa(q, q, q), QUERY, target="h200", out=tmp_path / "file")


def test_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        planning.plan(graph(), H200)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "cache").rglob("*") if path.is_dir()}
    assert modes == {0o700}


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(*_: Any, **__: Any) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(platformdirs, "user_cache_path", no_home)
    cache._default_folder.cache_clear()
    assert planning.plan(graph(), H200).origin == "planned here"
    monkeypatch.delenv("CUDNN_JAX_CACHE_DIR")
    planning.clear_memo()
    assert planning.plan(graph(), H200).origin == "planned here" and cache.cache_store() is None
    cache._default_folder.cache_clear()


def test_a_bound_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNN_JAX_CACHE_BYTES", "4G")
    with pytest.raises(ValueError, match="CUDNN_JAX_CACHE_BYTES is '4G'; the rule: a number of bytes"):
        planning.plan(graph(), H200)


def test_what_a_decline_of_the_moment_had_a_say_in_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(standin.Mix):
        def configs(self, *_: Any) -> Any:
            return [()]

        def build_plan(self, *_: Any) -> Any:
            raise TransientDecline("ran out of time")

    monkeypatch.setattr(standin, "Mix", Slow)
    slot = manifest.EngineSlot(1, "mix", ("support.standin", "Mix"))
    with standin.family(monkeypatch, "sdpa_fwd", slot):
        planned = planning.plan(graph(), H200)
    assert ("mix", "ran out of time") in [(d.engine, d.reason) for d in planned.declines]
    assert not (tmp_path / "cache").exists()


def test_a_program_of_another_layout_is_planned_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = planning.plan(graph(), H200)
    store = cache.cache_store()
    assert store is not None
    later = dataclasses.replace(load(graph()), program=b"of a later release")
    store.store(cache.local_key(graph(), H200, None), later)
    planning.clear_memo()
    assert planning.plan(graph(), H200).plan == first.plan


@pytest.mark.parametrize("ahead", [False, True])
def test_what_was_kept_hides_no_newer_record(ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with standin.family(monkeypatch, "sdpa_fwd", paced.SLOT):
        ranked = planning.plan(graph(), H200)
        if ahead:
            Store(tmp_path / "ahead").store(cache.portable_key(graph(), H200, None), load(graph()))
            monkeypatch.setenv("CUDNN_JAX_PROGRAMS", str(tmp_path / "ahead"))
        chosen = ranked.plans[3]
        assert (ranked.plan.name, chosen.name) == (paced.SLOW, paced.FAST)
        assert records.keep(graph(), H200, records.Record(chosen, 0.5)) is None
        for _ in range(2):  # made for the record, and then found
            planning.clear_memo()
            planned = planning.plan(graph(), H200)
            assert (planned.plan, planned.plans, planned.origin) == (
                chosen,
                ranked.plans,
                "autotune record, 0.5 ms",
            )
            monkeypatch.setattr(planning, "Planner", fail)


def test_records_are_told_apart_by_graph_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    record = records.Record(PlanConfig(3, (("k", 1),), engine="cudnn", kind="cudnn"), 0.5)
    assert records.keep(graph(), H200, record) is None
    assert records.find(graph(), dataclasses.replace(H200, ordinal=0, properties=None)) == record
    assert records.find(graph(0.25), H200) is None
    assert records.find(graph(), dataclasses.replace(H200, device_kind="another GPU")) is None
    assert records.find(graph(), dataclasses.replace(H200, sm_count=1)) is None
    assert records.find(graph(), Target("any")) is None


PROCESS = """
import json, sys
from cudnn_jax import _ffi
from cudnn_jax.engines import planning, records
from cudnn_jax.engines.base import Program
from cudnn_jax.engines.target import named
from support.stub_libcuda import candidates

_ffi.set_library_candidates(candidates())
made = planning.pygraph(io_data_type="bfloat16")
q, k, v = (made.tensor((2, 4, 64, 64), name=name) for name in "qkv")
out, _ = made.sdpa(q=q, k=k, v=v, attn_scale=0.5, generate_stats=False)
out.set_output(True)
lowered = []
plain = _ffi.BackendGraph
class Counted(plain):
    def __init__(self, *args):
        lowered.append(1)
        super().__init__(*args)
_ffi.BackendGraph = Counted
planned = planning.plan(made, named("h200"))
if "record" in sys.argv:
    records.keep(made, named("h200"), records.Record(planned.plans[1], 0.5))
    planned = planning.plan(made, named("h200"))
assert isinstance(planned.artifact, Program)
dsl = [name for name in sys.modules if name.split(".")[0] == "cutlass" or name.startswith("cuda.tile")]
print(json.dumps({"plan": planned.plan.name, "plans": [plan.name for plan in planned.plans],
                  "origin": planned.origin, "sha256": planned.artifact.sha256, "lowered": len(lowered), "dsl": dsl}))
"""


@pytest.fixture
def process(stub_folder: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    return partial(stub_libcuda.told_by, PROCESS, stub_folder, CUDNN_JAX_CACHE_DIR=str(tmp_path / "cache"))


def test_a_second_process_asks_neither_cudnn_nor_a_compiler(
    process: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    first, second = process(), process()
    assert (first.pop("lowered"), second.pop("lowered")) == (1, 0)
    assert (first.pop("origin"), second.pop("origin")) == ("planned here", "cache")
    assert first == second and second["dsl"] == [] and second["plan"].startswith("cudnn/")
    # A program that was damaged on disk is made again, not run.
    (program,) = (tmp_path / "cache").rglob("programs/*")
    program.write_bytes(program.read_bytes()[:-1] + b"\0")
    third = process()
    assert (third.pop("lowered"), third.pop("origin")) == (1, "planned here") and third == second


def test_a_second_process_runs_a_recorded_plan_of_cudnn(process: Callable[..., dict[str, Any]]) -> None:
    ranked, recorded, found = process(), process("record"), process()
    assert ranked["plan"] == ranked["plans"][0] != recorded["plan"] == ranked["plans"][1] == found["plan"]
    assert recorded["origin"] == found["origin"] == "autotune record, 0.5 ms"
    assert (found["sha256"], found["lowered"]) == (recorded["sha256"], 0) and found["sha256"] != ranked["sha256"]
