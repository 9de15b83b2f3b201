"""`graph.execute` on the CPU: a program and the reference engine on the caller's buffers, and what is refused."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax import _ffi, data_type
from cudnn_jax.engines import manifest, planning
from cudnn_jax.engines.base import Program
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.engines.target import CPU, Target
from cudnn_jax.graph import GraphNotSupportedError
from support import standin

SHAPE = (2, 4, 16, 32)
MIX = manifest.EngineSlot(1, "mix", ("support.standin", "Mix"))


@dataclasses.dataclass
class Case:
    """One attention graph and the arrays of one call of it."""

    graph: planning.pygraph
    q: Any
    k: Any
    v: Any
    o: Any
    arrays: dict[Any, Any]
    workspace: np.ndarray[Any, Any]

    def run(self, changed: dict[Any, Any] | None = None, **options: Any) -> Any:
        self.graph.execute(self.arrays | (changed or {}), **{"workspace": self.workspace} | options)
        return self.arrays[self.o]

    def expected(self) -> np.ndarray[Any, Any]:
        q, k, v = (np.asarray(self.arrays[x]) for x in (self.q, self.k, self.v))
        return q + 10 * k + 100 * v


def make_case(rng: np.random.Generator, dtype: Any = data_type.FLOAT, **options: Any) -> Case:
    graph = cudnn_jax.pygraph(io_data_type=dtype)
    q, k, v = (graph.tensor(dim=SHAPE, name=name) for name in "qkv")
    o, _ = graph.sdpa(q, k, v, generate_stats=False, **options)
    o.set_output(True).set_name("o")
    arrays = {x: rng.standard_normal(SHAPE, np.float32) for x in (q, k, v)}
    workspace = np.zeros(512 + 16, np.uint8)
    return Case(graph, q, k, v, o, arrays | {o: np.full(SHAPE, np.nan, np.float32)}, workspace)


@pytest.fixture(scope="module", autouse=True)
def symbol(tmp_path_factory: pytest.TempPathFactory) -> None:
    standin.register_symbol(tmp_path_factory.mktemp("standin"))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without one, also where there is one."""
    monkeypatch.setattr(_ffi, "device_count", lambda: 0)


@pytest.fixture
def case(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    with standin.family(monkeypatch, "sdpa_fwd", MIX):
        yield make_case(rng)


def refused(case: Case, changed: dict[Any, Any] | None = None, **options: Any) -> str:
    before = case.arrays[case.o].copy()
    with pytest.raises(ValueError) as raised:
        case.run(changed, **options)
    np.testing.assert_array_equal(case.arrays[case.o], before)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_numpy_in_and_out(case: Case) -> None:
    np.testing.assert_allclose(case.run(), case.expected(), rtol=1e-6)
    case.arrays[case.q] *= 2
    np.testing.assert_allclose(case.run(), case.expected(), rtol=1e-6)


def test_a_uid_of_any_integer_type_names_a_tensor(case: Case) -> None:
    case.arrays[case.o][:] = 0
    by_uid = {case.q.uid: case.arrays[case.q], np.int64(case.k.uid): case.arrays[case.k]}
    buffers = {key: value for key, value in case.arrays.items() if key not in (case.q, case.k)} | by_uid
    case.graph.execute(buffers, case.workspace)
    np.testing.assert_allclose(case.arrays[case.o], case.expected(), rtol=1e-6)


def test_jax_arrays_as_inputs_even_unfinished_ones(case: Case) -> None:
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: y @ y.T @ y * 1e-4, x))
    for tensor in (case.q, case.k, case.v):
        case.arrays[tensor] = slow(jnp.ones((1024, 1024)))[:256, :16].reshape(SHAPE)
    np.testing.assert_allclose(case.run(), case.expected(), rtol=1e-5)


def test_a_view_an_address_and_an_array_interface(case: Case) -> None:
    class Interface:
        def __init__(self, array: np.ndarray[Any, Any]) -> None:
            self.__array_interface__ = array.__array_interface__

    q, k, v, o = (case.arrays[x] for x in (case.q, case.k, case.v, case.o))
    changed = {
        case.q: cudnn_jax.DeviceView(q.ctypes.data, q.shape, q.dtype, owner=q),
        case.k: k.ctypes.data,
        case.v: Interface(v),
        case.o: cudnn_jax.DeviceView(o.ctypes.data, o.shape, "float32"),
    }
    case.graph.execute(changed, case.workspace.ctypes.data + -case.workspace.ctypes.data % 16)
    np.testing.assert_allclose(o, case.expected(), rtol=1e-6)


def test_what_is_missing_or_too_much_is_named(case: Case) -> None:
    message = "buffers: none for tensor 'k' (uid 2) (input), tensor 'o' (uid 4) (output)"
    with pytest.raises(ValueError) as raised:
        case.graph.execute({case.q: case.arrays[case.q], case.v: case.arrays[case.v]}, case.workspace)
    assert str(raised.value) == message
    known = "is no input or output of the graph; those are tensor 'q' (uid 1), tensor 'k' (uid 2), tensor 'v' (uid 3), "
    assert f"buffers: 99 {known}" in refused(case, {99: case.arrays[case.q]})
    assert f"buffers: 'q' {known}" in refused(case, {"q": case.arrays[case.q]})
    assert f"buffers: True {known}" in refused(case, {True: case.arrays[case.q]})
    foreign = cudnn_jax.pygraph().tensor(dim=SHAPE)
    assert known in refused(case, {foreign: case.arrays[case.q]})
    assert refused(case, {1: case.arrays[case.q]}) == "tensor 'q' (uid 1): given twice, by the tensor and by its uid"


def aligned(nbytes: int, past: int = 0) -> np.ndarray[Any, Any]:
    memory = np.zeros(nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + past
    return memory[start : start + nbytes]


def frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


WRONG = {
    "dtype": ("q", lambda x: x.astype(np.float64), "tensor 'q' (uid 1): the graph has float32, the buffer is float64"),
    "bfloat16": ("q", lambda x: x.astype(ml_dtypes.bfloat16), "the graph has float32, the buffer is bfloat16"),
    "complex": ("q", lambda x: x.astype(np.complex64), "element type is DLPack's (code 5, bits 64, lanes 1)"),
    "rank": ("v", lambda x: x[0], "tensor 'v' (uid 3): the graph has dim (2, 4, 16, 32), the buffer has (4, 16, 32)"),
    "dim": ("v", lambda x: x[:, :3], "the graph has dim (2, 4, 16, 32), the buffer has (2, 3, 16, 32)"),
    "stride": (
        "k",
        np.asfortranarray,
        "tensor 'k' (uid 2): the graph has stride (2048, 512, 32, 1), the buffer has (1, 2, 8, 128)",
    ),
    "alignment": (
        "q",
        lambda x: aligned(x.nbytes, 4).view(np.float32).reshape(SHAPE),
        "tensor 'q' (uid 1): the buffer's address is 4 bytes past a multiple of 16, the rule is a multiple of 16",
    ),
    "address": ("q", lambda x: 0, "tensor 'q' (uid 1): the buffer's address is 0"),
    "negative address": ("q", lambda x: -16, "tensor 'q' (uid 1): the address does not fit: OverflowError"),
    "huge address": ("q", lambda x: 1 << 80, "tensor 'q' (uid 1): the address does not fit: OverflowError"),
    "device": (
        "q",
        lambda x: cudnn_jax.DeviceView(x.ctypes.data, SHAPE, "float32", device=1),
        "tensor 'q' (uid 1): the graph runs on cpu, the buffer is on cuda:1",
    ),
    "read-only": ("o", frozen, "tensor 'o' (uid 4): an output, and the buffer is read-only"),
    "read-only view": (
        "o",
        lambda x: cudnn_jax.DeviceView(x.ctypes.data, SHAPE, "float32", read_only=True),
        "tensor 'o' (uid 4): an output, and the buffer is read-only",
    ),
    "jax output": ("o", jnp.asarray, "tensor 'o' (uid 4): an output, and the buffer is a jax.Array, which is immut"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_buffer_that_does_not_fit_is_refused_before_anything_runs(case: Case, name: str) -> None:
    which, change, message = WRONG[name]
    tensor = getattr(case, which)
    assert message in refused(case, {tensor: change(case.arrays[tensor].copy())})


def test_read_only_inputs_and_strides_of_single_axes_are_taken(rng: np.random.Generator, case: Case) -> None:
    frozen(case.arrays[case.q])
    np.testing.assert_allclose(case.run(), case.expected(), rtol=1e-6)
    rows = np.lib.stride_tricks.as_strided(rng.standard_normal(32, np.float32), (1, 1, 1, 32), (7, 12, 4, 4))
    graph = cudnn_jax.pygraph(io_data_type=data_type.FLOAT)
    q, k, v = (graph.tensor(dim=(1, 1, 1, 32)) for _ in range(3))
    o, _ = graph.sdpa(q, k, v, generate_stats=False)
    o.set_output(True)
    out = np.zeros((1, 1, 1, 32), np.float32)
    graph.execute({q: rows.copy(), k: rows.copy(), v: rows.astype(np.float32), o: out}, case.workspace)
    np.testing.assert_allclose(out, 111 * rows, rtol=1e-6)


def test_an_output_on_another_buffer_is_refused(case: Case) -> None:
    message = "tensor 'o' (uid 4): an output, and its buffer overlaps that of tensor 'v' (uid 3)"
    assert refused(case, {case.o: case.arrays[case.v]}) == message
    both = np.zeros(2 * case.arrays[case.q].nbytes, np.uint8)
    halves = [both[at : at + both.size // 2].view(np.float32).reshape(SHAPE) for at in (0, both.size // 2)]
    halves[0][:] = case.arrays[case.q]
    case.arrays |= {case.q: halves[0], case.o: halves[1]}
    np.testing.assert_allclose(case.run(), case.expected(), rtol=1e-6)


def test_the_same_input_twice_is_fine(case: Case) -> None:
    case.arrays[case.k] = case.arrays[case.v] = case.arrays[case.q]
    np.testing.assert_allclose(case.run(), case.expected(), rtol=1e-6)


@pytest.mark.parametrize("thing", ["text", None, 1.5, [1.0], True], ids=repr)
def test_what_is_no_buffer_is_a_type_error(case: Case, thing: Any) -> None:
    with pytest.raises(TypeError, match=r"tensor 'q' \(uid 1\): got a \w+, the rule is a DLPack producer"):
        case.run({case.q: thing})
    with pytest.raises(TypeError, match="buffers: got 5, the rule is a dictionary from tensors or uids to buffers"):
        case.graph.execute(5)


def test_a_view_that_was_never_made_is_refused(case: Case) -> None:
    empty = cudnn_jax.DeviceView.__new__(cudnn_jax.DeviceView)
    with pytest.raises(TypeError, match=r"tensor 'q' \(uid 1\): got a DeviceView whose __init__ never ran"):
        case.run({case.q: empty})
    with pytest.raises(TypeError, match="workspace: got a DeviceView whose __init__ never ran"):
        case.run(workspace=empty)
    del empty
    gc.collect()


INTERFACES: dict[str, tuple[dict[str, Any], str]] = {
    "no bytes": ({"typestr": "|V0"}, "its element type is |V0, the rule is 1 to 16 bytes"),
    "negative bytes": ({"typestr": "|V-2"}, "its element type is |V-2, the rule is 1 to 16 bytes"),
    "huge bytes": ({"typestr": "<f" + "9" * 30}, "the rule is 1 to 16 bytes"),
    "text after the bytes": ({"typestr": "<f4x"}, "its element type is <f4x, the rule is 1 to 16 bytes"),
    "fewer bytes than the dtype": ({"typestr": "|V1"}, "its element type is |V1, which no program has"),
    "a mask": ({"mask": np.ones(1, bool)}, "it has a mask, the rule is an array without one"),
    "a negative size": ({"shape": (-2, 4)}, "its shape has -2, the rule is 0 or more"),
    "too few strides": ({"strides": (4,)}, "__array_interface__ has 1 strides, the rule is 2, as many as dimensions"),
}


@pytest.mark.parametrize("name", INTERFACES)
def test_a_malformed_array_interface_is_refused(case: Case, name: str) -> None:
    changes, message = INTERFACES[name]
    data = case.arrays[case.q].ctypes.data

    class Interface:
        dtype = np.dtype(ml_dtypes.bfloat16)
        __array_interface__: Any = {
            "typestr": "<f4",
            "data": (data, False),
            "shape": (2, 4),
            "strides": (16, 4),
            "version": 3,
        } | changes

    assert message in refused(case, {case.q: Interface()})
    assert message in refused(case, workspace=Interface())


def test_a_workspace_of_impossible_size_is_refused(case: Case) -> None:
    huge = cudnn_jax.DeviceView(16, (2**40, 2**40), "uint8")
    assert refused(case, workspace=huge).startswith("workspace: the buffer has dim (1099511627776, 1099511627776), ")


def test_a_tracer_is_refused(case: Case) -> None:
    with pytest.raises((TypeError, ValueError), match=r"tensor 'q' \(uid 1\)"):
        jax.make_jaxpr(lambda x: case.run({case.q: x}) and x)(case.arrays[case.q])


def test_the_workspace(case: Case) -> None:
    assert case.graph.get_workspace_size() == 512
    rule = "the rule is at least 512 bytes"
    assert refused(case, workspace=None) == f"workspace: got None, {rule}"
    assert refused(case, workspace=aligned(511)) == f"workspace: got 511 bytes, {rule}"
    assert "workspace: its address is " in refused(case, workspace=aligned(512, 8))
    assert "workspace: the buffer is read-only" in refused(case, workspace=frozen(aligned(512)))
    assert "workspace: the buffer has strides (2,), the rule is no gaps" in refused(case, workspace=aligned(1024)[::2])
    elsewhere = cudnn_jax.DeviceView(256, (512,), "uint8", device=0)
    assert "workspace: the graph runs on cpu, the buffer is on cuda:0" in refused(case, workspace=elsewhere)
    with pytest.raises(TypeError, match="workspace: got a str"):
        case.run(workspace="text")
    on_v = case.arrays[case.v].reshape(-1)
    assert refused(case, workspace=on_v) == "workspace: it overlaps the buffer of tensor 'v' (uid 3)"
    case.run(workspace=aligned(512).view(np.float32).reshape(2, 64))
    np.testing.assert_allclose(case.arrays[case.o], case.expected(), rtol=1e-6)


def test_a_handle_is_asked_for_by_type(case: Case) -> None:
    handle = cudnn_jax.create_handle()
    np.testing.assert_allclose(case.run(handle=handle), case.expected(), rtol=1e-6)
    rule = "the rule is a cudnn_jax.Handle, as cudnn_jax.create_handle"
    for wrong in (5, "text", object()):
        with pytest.raises(TypeError, match=f"handle: got {type(wrong).__name__} .*{rule}"):
            case.run(handle=wrong)
        with pytest.raises(TypeError, match=rule):
            make_case(np.random.default_rng()).run(handle=wrong)
    cudnn_jax.destroy_handle(handle)
    with pytest.raises(RuntimeError, match="handle: it was destroyed"):
        case.run(handle=handle)


def test_eight_threads_on_one_graph(case: Case) -> None:
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        workspace, out = aligned(512), np.empty(SHAPE, np.float32)
        start.wait()
        for _ in range(300):
            q, k, v = (rng.standard_normal(SHAPE, np.float32) for _ in range(3))
            case.graph.execute({case.q: q, case.k: k, case.v: v, case.o: out}, workspace)
            np.testing.assert_array_equal(out, q + 10 * k + 100 * v)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_buffers_are_let_go(case: Case) -> None:
    class Array(np.ndarray[Any, Any]):
        pass

    watched = case.arrays[case.q].view(Array)
    gone = weakref.ref(watched)
    case.run({case.q: watched})
    refused(case, {case.q: watched, case.k: case.arrays[case.k][0]})
    del watched
    gc.collect()  # frames of the exception
    assert gone() is None


def test_a_graph_that_ran_can_be_collected(case: Case) -> None:
    case.run()
    gone = weakref.ref(case.graph)
    before = _ffi.counters()["programs_destroyed"]
    case.graph = case.q = case.k = case.v = case.o = None  # type: ignore[assignment]
    case.arrays.clear()
    gc.collect()
    assert gone() is None
    assert _ffi.counters()["programs_destroyed"] == before + 1


def test_the_plan_that_is_pinned_runs(case: Case) -> None:
    case.graph.create_execution_plans(target=CPU)
    np.testing.assert_allclose(case.run(), case.expected(), rtol=1e-6)
    case.graph.select_plan([plan.engine for plan in case.graph.plans].index("xla"))
    assert case.graph.get_workspace_size() == 0
    assert np.abs(case.run(workspace=None) - case.expected()).max() > 1


def attention(case: Case) -> np.ndarray[Any, Any]:
    q, k, v = (np.asarray(case.arrays[x], np.float64) for x in (case.q, case.k, case.v))
    scores = np.exp(q @ k.swapaxes(-1, -2))
    return scores / scores.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64], ids=lambda t: t.__name__)
def test_the_reference_engine_writes_into_the_callers_buffers(rng: np.random.Generator, dtype: Any) -> None:
    case = make_case(rng, data_type.of(dtype))
    case.arrays = {tensor: array.astype(dtype) for tensor, array in case.arrays.items()}
    tolerance = {2: 3e-2, 4: 1e-4, 8: 1e-10}[np.dtype(dtype).itemsize]
    got = case.run(workspace=None)
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(np.float64), attention(case), rtol=tolerance, atol=tolerance)
    tensor = "tensor 'q' \\(uid 1\\): the graph has"
    with pytest.raises(ValueError, match=tensor):
        case.run({case.q: case.arrays[case.q][:1]})
    with pytest.raises(TypeError, match="handle: got int 1"):
        case.run(handle=1)


def test_the_reference_engine_on_strided_buffers(rng: np.random.Generator) -> None:
    graph = cudnn_jax.pygraph(io_data_type=data_type.FLOAT)
    stride = (2048, 32, 128, 1)
    q, k, v = (graph.tensor(dim=SHAPE, stride=stride, name=name) for name in "qkv")
    o, _ = graph.sdpa(q, k, v, generate_stats=False)
    o.set_output(True).set_stride(stride)
    arrays = {x: rng.standard_normal((2, 16, 4, 32), np.float32).swapaxes(1, 2) for x in (q, k, v, o)}
    case = Case(graph, q, k, v, o, arrays, np.empty(0, np.uint8))
    np.testing.assert_allclose(case.run(workspace=None), attention(case), rtol=1e-4, atol=1e-5)


def test_a_plan_that_needs_jax_around_it_is_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    build = ProgramBuilder.build

    def with_prepare(self: ProgramBuilder) -> Program:
        program = build(self)
        return dataclasses.replace(program, prepare=lambda *x: x, operands=(case.q,), notes=("mask becomes a bias",))

    monkeypatch.setattr(ProgramBuilder, "build", with_prepare)
    with pytest.raises(
        GraphNotSupportedError, match=r"made from the graph's inputs \(mask becomes a bias\): inside jax"
    ):
        case.run()


def test_the_reference_engine_for_a_gpu_is_refused(rng: np.random.Generator) -> None:
    case = make_case(rng)
    case.graph.create_execution_plans(target=Target("rocm", device_kind="other"))
    with pytest.raises(GraphNotSupportedError, match="runs the reference engine on the CPU only, .* for rocm: inside"):
        case.run()


def test_the_pack_for_readers(case: Case) -> None:
    case.q, _ = case.q, case.graph.freeze()
    tensors = [*case.graph.inputs, *case.graph.outputs]
    rows = [(t, t.name, t.uid, "float32", list(t.dim), list(t.stride), t is case.o) for t in reversed(tensors)]
    pack = _ffi.GraphOperands(rows).pack(case.arrays)
    assert pack.uids == (1, 2, 3, 4)
    assert [pack.index_of(uid) for uid in (3, 1)] == [2, 0]
    last = pack.operands[pack.index_of(case.o.uid)]
    assert (last.pointer, last.shape, last.stride) == (case.arrays[case.o].ctypes.data, SHAPE, (2048, 512, 32, 1))
    assert (last.dtype, last.output, pack.operands[0].output) == ("float32", True, False)
    with pytest.raises(ValueError, match="uid: got 9, which the pack lacks"):
        pack.index_of(9)


def test_a_python_error_in_a_producer_is_told_and_an_interrupt_goes_through(case: Case) -> None:
    class Producer:
        error: BaseException = OSError("disk\non fire")

        def __dlpack__(self, **_: Any) -> Any:
            raise self.error

    producer = Producer()
    assert refused(case, {case.q: producer}).endswith(
        "__dlpack__ of test_a_python_error_in_a_producer_is_told_and_an_interrupt_goes_through.<locals>.Producer failed: OSError: disk on fire"
    )
    producer.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        case.run({case.q: producer})


def test_a_producer_that_changes_the_dictionary(case: Case) -> None:
    array = case.arrays[case.q]

    class Producer:
        def __dlpack__(self, **_: Any) -> Any:
            buffers.clear()
            return array.__dlpack__()

    buffers = {case.q: Producer(), **{x: case.arrays[x] for x in (case.k, case.v, case.o)}}
    with pytest.raises(ValueError, match="buffers: none for tensor 'k'"):
        case.graph.execute(buffers, case.workspace)


def test_many_types_do_not_fill_memory(case: Case) -> None:
    def fresh() -> Any:
        class Interface:
            __array_interface__ = case.arrays[case.q].__array_interface__

        return Interface

    alive = []
    for _ in range(100):
        made = fresh()
        alive.append(weakref.ref(made))
        case.run({case.q: made()})
        del made
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 16


def test_a_device_view_is_a_producer() -> None:
    class Owner:
        memory = (ctypes.c_float * 6)(*range(6))

    owner = Owner()
    gone = weakref.ref(owner)
    view = cudnn_jax.DeviceView(ctypes.addressof(owner.memory), (2, 3), jnp.float32, strides=(1, 2), owner=owner)
    assert (view.shape, view.strides, view.dtype, view.device) == ((2, 3), (1, 2), "float32", None)
    assert view.__dlpack_device__() == (1, 0)
    taken = np.from_dlpack(view)
    np.testing.assert_array_equal(taken, [[0, 2, 4], [1, 3, 5]])
    unused = [view.__dlpack__(), view.__dlpack__(max_version=(1, 0))]
    assert '"dltensor"' in repr(unused[0]) and '"dltensor_versioned"' in repr(unused[1])
    del owner, view, unused
    gc.collect()
    assert gone() is not None
    del taken
    gc.collect()
    assert gone() is None


def test_what_a_device_view_refuses() -> None:
    with pytest.raises(ValueError, match="dtype: got 'complex64', the rule is one that a program has"):
        cudnn_jax.DeviceView(16, (2,), "complex64")
    with pytest.raises(ValueError, match="strides: got 1, the rule is one for each of the 2 dimensions"):
        cudnn_jax.DeviceView(16, (2, 2), "int8", (1,))
    with pytest.raises(ValueError, match="device: got -1"):
        cudnn_jax.DeviceView(16, (2,), "int8", device=-1)
    with pytest.raises(ValueError, match="shape: got -2"):
        cudnn_jax.DeviceView(16, (-2,), "int8")
    view = cudnn_jax.DeviceView(16, (2,), data_type.INT8, read_only=True)
    with pytest.raises(BufferError, match="read-only"):
        view.__dlpack__()
    with pytest.raises(BufferError, match="copy=True"):
        view.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="dl_device"):
        view.__dlpack__(dl_device=(2, 0))
    assert view.__dlpack__(max_version=(1, 1), dl_device=(1, 0), copy=False)


@pytest.mark.parametrize("place", ["graph", "node", "between"])
def test_a_graph_that_is_64_bits_wide_only_inside(place: str) -> None:
    graph = cudnn_jax.pygraph(io_data_type="float32", compute_data_type="float64" if place == "graph" else "float32")
    x = graph.tensor((4,))
    inner = graph.exp(x, compute_data_type="float64" if place == "node" else None)
    inner.set_data_type("float64" if place == "between" else "float32")
    out = graph.log(inner).set_output(True).set_data_type("float32")
    given, made = np.linspace(0, 1, 4, dtype=np.float32), np.zeros(4, np.float32)
    graph.execute({x: given, out: made})
    np.testing.assert_allclose(made, given, atol=1e-6)
