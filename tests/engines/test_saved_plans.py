"""A planned graph as bytes: it runs in another process, and what it is not for is refused in one line."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax import _ffi
from cudnn_jax.engines import manifest, planning, saved, versions
from cudnn_jax.engines.base import Program
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import CPU, named
from cudnn_jax.graph import GraphFrozenError, GraphNotSupportedError
from support import standin, stub_libcuda
from support.stub_libcuda import stub_folder as stub_folder

SHAPE = (2, 4, 8, 48)
MIX = manifest.EngineSlot(1, "mix", ("support.standin", "Mix"))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without one, also where there is one."""
    monkeypatch.setattr(_ffi, "device_count", lambda: 0)


def attention() -> pygraph:
    graph = cudnn_jax.pygraph("attend", io_data_type="float32")
    q, k, v = (graph.tensor(SHAPE, name=name, uid=uid) for name, uid in (("q", 30), ("k", 20), ("v", 10)))
    graph.sdpa(q, k, v, generate_stats=False, attn_scale=0.25)[0].set_output(True).set_name("o").set_uid(40)
    return graph


def planned(implementation: str | None = None) -> pygraph:
    graph = attention()
    graph.create_execution_plans(target=CPU, implementation=implementation)
    return graph


def run(graph: pygraph, arrays: dict[int, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    out = np.full(SHAPE, np.nan, np.float32)
    workspace = np.zeros(graph.get_workspace_size() + 16, np.uint8)
    graph.execute(arrays | {40: out}, workspace[-workspace.ctypes.data % 16 :])
    return out


def drawn(rng: np.random.Generator) -> dict[int, np.ndarray[Any, Any]]:
    return {uid: rng.standard_normal(SHAPE, np.float32) for uid in (30, 20, 10)}


CHILD = """
import sys, numpy, cudnn_jax
graph = cudnn_jax.pygraph.deserialize(open(sys.argv[1], "rb").read())
arrays = dict(numpy.load(sys.argv[2]))
out = numpy.full((2, 4, 8, 48), numpy.nan, numpy.float32)
graph.execute({int(uid): array for uid, array in arrays.items()} | {40: out})
numpy.save(sys.argv[3], out)
open(sys.argv[1], "wb").write(graph.serialize())
"""


def test_a_plan_runs_in_another_process(tmp_path: Path, rng: np.random.Generator) -> None:
    graph, arrays = planned("xla"), drawn(rng)
    data = graph.serialize()
    assert data == planned("xla").serialize()
    paths = [tmp_path / name for name in ("plan", "in.npz", "out.npy")]
    paths[0].write_bytes(data)
    np.savez(paths[1], **{str(uid): array for uid, array in arrays.items()})
    subprocess.run([sys.executable, "-c", CHILD, *paths], check=True, env=_cpu_environment())
    np.testing.assert_array_equal(np.load(paths[2]), run(graph, arrays))
    assert paths[0].read_bytes() == data, "another process writes the same bytes"


def _cpu_environment() -> dict[str, str]:
    import os

    return dict(os.environ) | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "7"}


@pytest.fixture
def mixed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    standin.register_symbol(tmp_path_factory.mktemp("standin"))
    with standin.family(monkeypatch, "sdpa_fwd", MIX):
        yield planned()


def test_a_program_is_taken_as_it_was_built(mixed: pygraph, rng: np.random.Generator) -> None:
    config, artifact = mixed.build_plans()
    data = mixed.serialize()
    before = standin.Mix.build_plan
    standin.Mix.build_plan = lambda *_: pytest.fail("built again")
    try:
        graph = pygraph.deserialize(data)
        ((plan,), (again, restored)) = graph.plans, graph.build_plans()
        graph.select_plan(0)
        assert (plan, again, plan.engine, graph.build_plans()[1]) == (config, config, "mix", restored)
        assert isinstance(artifact, Program) and isinstance(restored, Program) and restored.data == artifact.data
        arrays = drawn(rng)
        np.testing.assert_allclose(run(graph, arrays), arrays[30] + 10 * arrays[20] + 100 * arrays[10], rtol=1e-6)
    finally:
        standin.Mix.build_plan = before
    assert graph.serialize() == data


def test_jax_runs_the_plan_that_came_with_the_graph(
    mixed: pygraph, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = cudnn_jax.pygraph.deserialize(mixed.serialize())
    monkeypatch.setattr(planning, "_found_or_planned", lambda *_: pytest.fail("planned again"))
    planned_there = planning.plan(graph, CPU)
    assert (planned_there.plan.engine, planned_there.origin) == ("mix", "came with the graph")
    arrays = drawn(rng)
    given = [arrays[tensor.uid] for tensor in graph.inputs]
    (made,) = graph.as_jax()(*given)
    np.testing.assert_allclose(made, arrays[30] + 10 * arrays[20] + 100 * arrays[10], rtol=1e-6)
    monkeypatch.undo()
    assert planning.plan(graph, CPU, "xla").plan.engine == "xla"
    assert planning.plan(attention(), named("h200")).origin != "came with the graph"


def test_bytes_are_read_once(mixed: pygraph, monkeypatch: pytest.MonkeyPatch) -> None:
    data, read = mixed.serialize(), saved._content
    seen: list[bytes] = []
    monkeypatch.setattr(saved, "_content", lambda data: seen.append(data) or read(data))
    pygraph.deserialize(data)
    assert seen == [data]


def test_what_comes_back_is_planned_and_frozen(mixed: pygraph) -> None:
    graph = cudnn_jax.pygraph.deserialize(mixed.serialize())
    assert type(graph) is cudnn_jax.pygraph and graph.frozen and graph.to_json() == mixed.to_json()
    with pytest.raises(GraphFrozenError):
        graph.tensors[0].set_dim((1,))
    with pytest.raises(RuntimeError, match="planned once"):
        graph.create_execution_plans()
    with pytest.raises(IndexError, match="the list has 1 plans"):
        graph.select_plan(1)


def test_a_pinned_plan_is_the_one_that_is_written(mixed: pygraph) -> None:
    mixed.select_plan(1)
    assert pygraph.deserialize(mixed.serialize()).plans[0].engine == "xla"
    with pytest.raises(RuntimeError, match="call create_execution_plans first"):
        attention().serialize()


def test_the_header_says_whom_it_is_for(mixed: pygraph) -> None:
    head = saved.header(mixed.serialize())
    assert head["release"] == cudnn_jax.__version__
    assert head["libraries"] == {"cudnn": None, "cutedsl": None}
    assert head["target"] == {"platform": "cpu", "device_kind": "cpu", "sm": None, "sm_count": None}
    assert len(head["key"]) == 64


def changed(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The bytes with another content, and the hash of that."""
    outer = msgpack.unpackb(data)
    content = msgpack.unpackb(outer["content"])
    change(content)
    outer["content"] = msgpack.packb(content)
    return bytes(msgpack.packb(outer | {"sha256": hashlib.sha256(outer["content"]).digest()}))


OTHERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "release": (
        lambda content: content["header"].update(release="0.0.9"),
        f"plan: made by cudnn_jax 0.0.9, here is {cudnn_jax.__version__}; build it anew",
    ),
    "cutedsl": (
        lambda content: content["header"]["libraries"].update(cutedsl="1.0"),
        "plan: needs cutedsl 1.0, here is 4.8; build it anew",
    ),
    "cudnn": (
        lambda content: content["header"]["libraries"].update(cudnn=91800),
        "plan: needs cudnn 91800, here is 91900; build it anew",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_for_others_is_refused_in_one_line(mixed: pygraph, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(saved._LIBRARIES, "cudnn", lambda: 91900)
    monkeypatch.setitem(saved._LIBRARIES, "cutedsl", lambda: "4.8")
    change, message = OTHERS[name]
    with pytest.raises(GraphNotSupportedError) as raised:
        pygraph.deserialize(changed(mixed.serialize(), change))
    assert str(raised.value) == message


def test_a_library_that_is_not_here_is_named(mixed: pygraph, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise _ffi.LibraryNotFound("libcudnn: tried\nnothing")

    monkeypatch.setitem(saved._LIBRARIES, "cudnn", none)
    data = changed(mixed.serialize(), lambda content: content["header"]["libraries"].update(cudnn=91900))
    with pytest.raises(GraphNotSupportedError) as raised:
        pygraph.deserialize(data)
    assert str(raised.value) == "plan: needs cudnn 91900: libcudnn: tried nothing"


def test_another_device_is_refused_in_one_line(mixed: pygraph) -> None:
    h200 = named("h200")
    with pytest.raises(GraphNotSupportedError) as raised:
        pygraph.deserialize(mixed.serialize(), h200)
    assert str(raised.value) == "plan: made for cpu, asked for on NVIDIA H200 (sm_90); build it anew"
    data = changed(
        mixed.serialize(),
        lambda content: content["header"]["target"].update(
            platform="cuda", device_kind="NVIDIA H200", sm=90, sm_count=132
        ),
    )
    with pytest.raises(GraphNotSupportedError) as raised:
        pygraph.deserialize(data, replace(h200, sm=100, device_kind="NVIDIA B200"))
    wanted = "plan: made for NVIDIA H200 (sm_90), asked for on NVIDIA B200 (sm_100); build it anew"
    assert str(raised.value) == wanted
    with pytest.raises(GraphNotSupportedError, match=r"^plan: made on other, here is \w+; build it anew$"):
        pygraph.deserialize(changed(data, lambda content: content["header"].update(host="other")), h200)


DAMAGED: dict[str, tuple[Callable[[bytes], Any], str]] = {
    "no bytes": (lambda data: "text", "plan: got a str; the rule: bytes as pygraph.serialize makes them"),
    "nothing": (lambda data: b"", "plan: 0 bytes that are no plan; the rule"),
    "cut": (lambda data: data[:-9], r"plan: \d+ bytes that are no plan; the rule"),
    "a program": (
        lambda data: msgpack.unpackb(msgpack.unpackb(data)["content"])["program"],
        "plan: 'cudnn_jax.program' of version 1; the rule: 'cudnn_jax.plan' of version 1",
    ),
    "newer": (
        lambda data: msgpack.packb(msgpack.unpackb(data) | {"version": 2}),
        "plan: 'cudnn_jax.plan' of version 2; the rule: 'cudnn_jax.plan' of version 1",
    ),
    "another content": (
        lambda data: msgpack.packb(msgpack.unpackb(data) | {"content": b"\x80"}),
        "plan: damaged, its content has another sha256 than it says",
    ),
    "without a hash": (
        lambda data: data.replace(b"sha256", b"sha255"),
        "plan: KeyError: 'sha256'; the rule: bytes as",
    ),
    "without a program": (
        lambda data: changed(data, lambda content: content.pop("program")),
        "plan: KeyError: 'program'; the rule: bytes as",
    ),
    "a header of another kind": (
        lambda data: changed(data, lambda content: content.update(header=[])),
        "plan: TypeError: list indices must be integers or slices, not str; the rule: bytes as",
    ),
    "another graph": (
        lambda data: changed(data, lambda content: content.update(graph=content["graph"].replace("0.25", "0.5"))),
        r"plan: its key \w{16} is not that of the graph and target beside it",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged_is_refused_in_one_line(mixed: pygraph, name: str) -> None:
    change, message = DAMAGED[name]
    with pytest.raises(ValueError, match=message) as raised:
        pygraph.deserialize(change(mixed.serialize()))
    assert "\n" not in str(raised.value)


def test_the_versions_asked_for_are_those_of_the_process() -> None:
    assert saved._LIBRARIES == {"cudnn": versions.cudnn, "cutedsl": versions.cutedsl}


AHEAD = """
import json, sys
from cudnn_jax.engines import saved
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import named
if sys.argv[2] == "write":
    graph = pygraph(io_data_type="bfloat16")
    q, k, v = (graph.tensor((2, 4, 128, 64), (32768, 64, 256, 1)) for _ in range(3))
    graph.sdpa(q, k, v, generate_stats=False)[0].set_output(True)
    graph.create_execution_plans(target=named("h200"), implementation="cudnn")
    data = graph.serialize()
    open(sys.argv[1], "wb").write(data)
else:
    data = open(sys.argv[1], "rb").read()
    graph = pygraph.deserialize(data, named("h200"))
    assert graph.serialize() == data
plan, program = graph.build_plans()
print(json.dumps({**saved.header(data), "plan": plan.name, "sha256": program.sha256}))
"""


def test_a_cudnn_plan_goes_to_another_process(stub_folder: Path, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan")
    written, read = (stub_libcuda.told_by(AHEAD, stub_folder, plan, step) for step in ("write", "read"))
    assert written == read and written["plan"].startswith("cudnn/")
    assert written["libraries"] == {"cudnn": stub_libcuda.CUDNN, "cutedsl": None}
    assert written["target"] == {"platform": "cuda", "device_kind": "NVIDIA H200", "sm": 90, "sm_count": 132}
