"""Handles, devices and CUDA programs over a driver and a cuDNN that record their calls: recorded_calls.py LIBRARY NAME.

Each function below is one test and runs in a process of its own, because the libraries that are open stay open. Device
memory is numpy's here, and a stream is the address of a word that holds its context: 0xd0 for device 0, 0xd1 for 1.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Callable
from typing import Any

import ffi_programs
import numpy as np

import cudnn_jax
from cudnn_jax import _ffi
from support.dlpack_producer import CUDA, Source, Unversioned, Versioned, exchange_type

library: ctypes.CDLL
tests: dict[str, Callable[[], None]] = {}
_contexts = (ctypes.c_uint64 * 4)(0xD0, 0xD0, 0xD1, 0xD0)
STREAM, OTHER, ON_DEVICE_1, THIRD = (ctypes.addressof(_contexts) + 8 * i for i in range(4))


def test(fn: Callable[[], None]) -> None:
    tests[fn.__name__] = fn


def journal() -> str:
    library.take_journal.restype = ctypes.c_char_p
    return library.take_journal().decode()


def raises(kind: type[BaseException], message: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert message in str(error), f"got {error}, wanted {message}"
    else:
        raise AssertionError(f"no {kind.__name__}: {message}")


# Handles


@test
def a_handle_opens_cudnn_when_it_is_asked_for() -> None:
    handle = cudnn_jax.create_handle(device=1, stream=ON_DEVICE_1)
    assert (handle.device, handle.stream, cudnn_jax.get_stream(handle)) == (1, ON_DEVICE_1, ON_DEVICE_1)
    assert journal() == ""
    backend = handle.backend_handle
    made = journal()
    assert f"create in d1; stream {ON_DEVICE_1:x}; " in re.sub("(retain|bind|capture mode) [0-9a-f]+; ", "", made), made
    assert backend != 0 and handle.backend_handle == backend and journal() == ""


@test
def the_same_stream_again_makes_no_backend_call() -> None:
    handle = cudnn_jax.create_handle()
    cudnn_jax.set_stream(handle=handle, stream=STREAM)
    assert handle.backend_handle and f"stream {STREAM:x}; " in journal()
    cudnn_jax.set_stream(handle, STREAM)
    assert journal() == ""
    cudnn_jax.set_stream(handle, OTHER)
    moved = journal()
    assert moved.count(f"stream {OTHER:x}; ") == 1 and "create" not in moved, moved
    assert cudnn_jax.get_stream(handle=handle) == OTHER
    library.fail_next()
    raises(
        RuntimeError, "cudnnSetStream failed: CUDNN_STATUS_OF_THE_TEST", lambda: cudnn_jax.set_stream(handle, STREAM)
    )
    assert handle.stream == OTHER
    journal()
    cudnn_jax.set_stream(handle, STREAM)
    assert f"stream {STREAM:x}; " in journal() and handle.stream == STREAM


@test
def a_stream_of_another_device_is_refused() -> None:
    rows = arrays()
    program, handle = executable(), cudnn_jax.create_handle(0, ON_DEVICE_1)
    message = f"stream: {ON_DEVICE_1} is one of device 1, the handle is for device 0"
    raises(ValueError, message, lambda: program.execute(views(rows), None, handle))
    raises(ValueError, message, lambda: handle.backend_handle)
    seen = journal()
    assert "launch" not in seen and "create" not in seen, seen
    cudnn_jax.set_stream(handle, STREAM)
    assert handle.backend_handle
    raises(ValueError, message, lambda: cudnn_jax.set_stream(handle, ON_DEVICE_1))
    assert handle.stream == STREAM and f"stream {ON_DEVICE_1:x}; " not in journal()
    program.execute(views(rows), None, handle)
    check(rows)
    made = ctypes.c_void_p()
    library.cudnnCreate(ctypes.byref(made))
    library.cudnnSetStream(made, ctypes.c_void_p(ON_DEVICE_1))
    raises(ValueError, message, lambda: cudnn_jax.Handle(made.value, 0).backend_handle)


@test
def a_streams_device_is_asked_once() -> None:
    rows = arrays()
    program, handle = executable(), cudnn_jax.create_handle(0, STREAM)
    for _ in range(3):
        program.execute(views(rows), None, handle)
    assert handle.backend_handle and journal().count("ask device; ") == 1
    for stream in (0, 1, 2):  # of whatever device
        cudnn_jax.set_stream(handle, stream)
        assert handle.backend_handle
    assert "ask device; " not in journal()


@test
def destroying_twice_is_safe_and_any_later_use_is_an_error() -> None:
    handle = cudnn_jax.create_handle()
    assert handle.backend_handle
    library.fail_next()
    raises(RuntimeError, "cudnnDestroy failed", lambda: cudnn_jax.destroy_handle(handle))
    assert handle.backend_handle  # a failed attempt leaves the handle as it is
    journal()
    cudnn_jax.destroy_handle(handle)
    assert journal().count("destroy in d0; ") == 1
    cudnn_jax.destroy_handle(handle=handle)
    assert journal() == ""
    uses = (
        lambda: handle.backend_handle,
        lambda: handle.device,
        lambda: handle.stream,
        lambda: cudnn_jax.get_stream(handle),
        lambda: cudnn_jax.set_stream(handle, STREAM),
    )
    for use in uses:
        raises(RuntimeError, "handle: it was destroyed", use)
    assert repr(handle) == "<cudnn_jax.Handle, destroyed>"
    never_made = cudnn_jax.create_handle()
    cudnn_jax.destroy_handle(never_made)
    assert journal() == ""


@test
def a_handle_is_itself_and_no_number() -> None:
    one, two = cudnn_jax.create_handle(), cudnn_jax.create_handle()
    assert one == one and one != two and len({one, two, one}) == 2 and one
    for convert in (int, float, hex, range):
        raises(TypeError, "", lambda convert=convert: convert(one))
    for use in (_ffi.get_stream, _ffi.destroy_handle, lambda x: _ffi.set_stream(x, 0)):
        for wrong in (5, one.backend_handle, None):
            raises(TypeError, "the rule is a cudnn_jax.Handle, as cudnn_jax.create_handle", lambda: use(wrong))
        empty = cudnn_jax.Handle.__new__(cudnn_jax.Handle)
        raises(TypeError, "handle: got a cudnn_jax.Handle whose __init__ never ran", lambda: use(empty))


@test
def a_handle_made_elsewhere_is_wrapped() -> None:
    made = ctypes.c_void_p()
    library.cudnnCreate(ctypes.byref(made))
    library.cudnnSetStream(made, ctypes.c_void_p(STREAM))
    journal()
    handle = cudnn_jax.Handle(made.value, 0, STREAM)
    assert (handle.backend_handle, handle.device, handle.stream) == (made.value, 0, STREAM)
    assert re.sub("(retain|bind) [0-9a-f]+; |ask device; ", "", journal()) == "ask stream; "
    assert cudnn_jax.Handle(made.value, 0).stream == STREAM
    raises(
        ValueError,
        f"stream: got {OTHER}, the cuDNN handle is on {STREAM}",
        lambda: cudnn_jax.Handle(made.value, 0, OTHER),
    )
    raises(ValueError, "backend_handle: got 0", lambda: cudnn_jax.Handle(0, 0))
    library.fail_next()
    raises(RuntimeError, "cudnnGetStream failed", lambda: cudnn_jax.Handle(made.value, 0))
    journal()
    del handle
    gc.collect()
    assert journal() == ""  # it is its maker's


@test
def a_handle_that_is_dropped_serves_others() -> None:
    handle = cudnn_jax.create_handle()
    assert handle.backend_handle
    journal()
    library.fail_descriptors(1)  # it brings its own
    del handle
    gc.collect()
    assert journal() == ""


@test
def streams_come_by_number_or_by_the_attributes_of_libraries() -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, STREAM)

    class Newer:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (1, STREAM)

    class Torch:
        cuda_stream = OTHER

    class Cupy:
        ptr = THIRD

    handle = cudnn_jax.create_handle(stream=Protocol())
    assert handle.stream == STREAM
    for stream, wanted in ((Torch(), OTHER), (Cupy(), THIRD), (0, 0)):
        cudnn_jax.set_stream(handle, stream)
        assert handle.stream == wanted
    raises(
        ValueError, "stream: its protocol is version 1, the rule is 0", lambda: cudnn_jax.set_stream(handle, Newer())
    )
    for wrong in (None, True, "text", -1, 1.5):
        raises(TypeError, f"stream: got {type(wrong).__name__} ", lambda: cudnn_jax.set_stream(handle, wrong))
    for device in (-1, 64):
        raises(ValueError, f"device: got {device}", lambda: cudnn_jax.create_handle(device))
    takers: tuple[Callable[[Any], Any], ...] = (
        cudnn_jax.create_handle,
        cudnn_jax.device_info,
        lambda device: cudnn_jax.Handle(16, device),
        lambda device: cudnn_jax.DeviceView(16, (1,), "int8", device=device),
    )
    for take in takers:
        for wrong in (True, 1.0, "0"):
            message = f"device: got {type(wrong).__name__} {wrong!r}, the rule is an integer"
            raises(TypeError, message, lambda: take(wrong))
    assert cudnn_jax.create_handle(np.int32(1)).device == 1


@test
def a_driver_that_does_not_work_is_no_gpu_and_says_why_when_asked() -> None:
    from cudnn_jax.engines import execution

    library.break_driver(3)
    handle = cudnn_jax.create_handle()
    assert _ffi.device_count() == 0 and execution.target_of(None).platform == "cpu"
    raises(RuntimeError, "counting devices failed: error 3, initialization error", lambda: cudnn_jax.device_info(0))
    raises(RuntimeError, "cuInit failed: CUDA_ERROR_NOT_INITIALIZED", lambda: handle.backend_handle)
    library.break_driver(0)
    assert _ffi.device_count() == 2 and handle.backend_handle


# Devices


@test
def facts_of_a_device_are_asked_once() -> None:
    info = cudnn_jax.device_info(1)
    assert journal() == "name of 1; "
    assert cudnn_jax.device_info(1) is info and journal() == ""
    assert (info.ordinal, info.name, info.sm, info.sm_count) == (1, "Recorded 80", 80, 131)
    assert (info.shared_memory_per_block, info.shared_memory_per_block_opt_in) == (48 << 10, 227 << 10)
    assert (info.l2_bytes, info.total_memory, info.pci_bus_id) == (50 << 20, 2 << 34, "0000:01:00.0")
    assert _ffi.device_count() == 2
    for ordinal in (2, -1, 99):
        raises(
            ValueError,
            f"device: got {ordinal}, the rule is an ordinal of one of the 2",
            lambda: cudnn_jax.device_info(ordinal),
        )
    raises(AttributeError, "", lambda: setattr(info, "sm", 1))


@test
def versions_are_told_in_one_place() -> None:
    found = cudnn_jax.versions()
    assert (found.cuda_driver, found.cudnn) == (13000, 91900)
    assert "cuda_driver" not in found.missing and found.xla_ffi == _ffi.XLA_FFI_API_VERSION


# Programs

IMAGE = b"IMAGE 90 axpy:ppplf\0"
COUNT = 64


class Key:
    pass


KEYS = [Key() for _ in range(3)]


def executable(device_kind: str = "Recorded 90", device: int = 0) -> _ffi.Executable:
    """out = 2 x + y, as a kernel of device 0's architecture."""
    rows = [
        (key, f"tensor {name!r}", i + 1, "float32", [COUNT], [1], i == 2)
        for i, (key, name) in enumerate(zip(KEYS, "xyo", strict=True))
    ]
    step = {
        "kind": "cubin",
        "kernel": "axpy",
        "image": IMAGE,
        "grid": [1, 1, 1],
        "args": [
            ["operand", 0],
            ["operand", 1],
            ["operand", 2],
            ["immediate", ["int64", COUNT]],
            ["immediate", ["float32", 2.0]],
        ],
    }
    content = ffi_programs.payload(
        [ffi_programs.buffer("float32", COUNT)] * 2, [ffi_programs.buffer("float32", COUNT)], [step], 0, "cuda", 90
    )
    return _ffi.Executable(_ffi.GraphOperands(rows), ffi_programs.seal(content), device, device_kind)


def arrays() -> list[np.ndarray[Any, Any]]:
    memory = np.random.default_rng().standard_normal((3, COUNT + 4), np.float32)
    return [row[(-row.ctypes.data % 16) // 4 :][:COUNT] for row in memory]


def views(rows: list[np.ndarray[Any, Any]], device: int | None = 0) -> dict[Any, Any]:
    pairs = zip(KEYS, rows, strict=True)
    return {
        key: cudnn_jax.DeviceView(row.ctypes.data, row.shape, "float32", device=device, owner=row) for key, row in pairs
    }


def check(rows: list[np.ndarray[Any, Any]]) -> None:
    np.testing.assert_allclose(rows[2], 2 * rows[0] + rows[1], rtol=1e-6)


@test
def a_program_runs_on_the_handles_stream_in_the_streams_context() -> None:
    rows = arrays()
    program, handle = executable(), cudnn_jax.create_handle(stream=STREAM)
    program.execute(views(rows), None, handle)
    check(rows)
    first = journal()
    assert "bind d0; " in first and first.endswith("bind 0; "), first
    program.execute(views(rows), None, handle)
    again = journal()
    assert "load" not in again and again.startswith("bind d0; ") and again.endswith("bind 0; "), again
    rows = arrays()
    program.execute(views(rows))
    check(rows)


@test
def a_foreign_context_is_replaced_and_put_back() -> None:
    rows = arrays()
    program = executable()
    current = ctypes.c_void_p()
    library.cuCtxSetCurrent(ctypes.c_void_p(0xD1))
    program.execute(views(rows), None, cudnn_jax.create_handle(stream=STREAM))
    library.cuCtxGetCurrent(ctypes.byref(current))
    assert current.value == 0xD1
    assert "bind d0; " in journal()
    check(rows)


@test
def a_handle_of_another_device_is_refused_before_any_launch() -> None:
    rows = arrays()
    program = executable()
    handle = cudnn_jax.create_handle(1)
    message = "handle: the graph was planned for Recorded 90, device 1 is Recorded 80"
    raises(RuntimeError, message, lambda: program.execute(views(rows, 1), None, handle))
    assert "launch" not in journal()
    message = "tensor 'x': the graph runs on cuda:1, the buffer is on cuda:0"
    raises(ValueError, message, lambda: program.execute(views(rows), None, handle))
    raises(
        ValueError,
        "tensor 'x': the graph runs on cuda:0, the buffer is on cpu",
        lambda: program.execute(views(rows, None)),
    )
    raises(
        ValueError,
        "the graph runs on cuda:0, the buffer is on cpu",
        lambda: program.execute(dict(zip(KEYS, rows, strict=True))),
    )
    raises(
        RuntimeError,
        "the program is for sm_90, device 1 is sm_80",
        lambda: executable("Recorded 80").execute(views(rows, 1), None, handle),
    )


@test
def a_destroyed_handle_runs_nothing() -> None:
    rows = arrays()
    program, handle = executable(), cudnn_jax.create_handle()
    cudnn_jax.destroy_handle(handle)
    raises(RuntimeError, "handle: it was destroyed", lambda: program.execute(views(rows), None, handle))
    raises(TypeError, "handle: got int 7", lambda: program.execute(views(rows), None, 7))
    assert journal() == ""


@test
def producers_are_told_the_stream() -> None:
    program = executable()
    for stream, told in ((0, 1), (STREAM, STREAM)):
        rows = arrays()
        kinds = (Versioned, Unversioned, Versioned)
        given = {key: kind(row, device=(CUDA, 0)) for key, kind, row in zip(KEYS, kinds, rows, strict=True)}
        program.execute(given, None, cudnn_jax.create_handle(stream=stream))
        check(rows)
        assert [source.keywords["stream"] for source in given.values()] == [told] * 3
        assert [source.deleted for source in given.values()] == [1] * 3


@test
def tables_are_asked_for_their_stream_and_waited_for() -> None:
    program = executable()
    kind = exchange_type(stream=lambda: OTHER)
    for stream, waits in ((OTHER, ""), (STREAM, f"record on {OTHER:x}; wait on {STREAM:x}; ")):
        rows = arrays()
        given: dict[Any, Source] = {key: kind(row, device=(CUDA, 0)) for key, row in zip(KEYS, rows, strict=True)}
        program.execute(given, None, cudnn_jax.create_handle(stream=stream))
        check(rows)
        seen = journal()
        assert "".join(re.findall(r"(?:record|wait) on \w+; ", seen)) == waits, seen
        assert kind.asked == [(CUDA, 0)]  # type: ignore[attr-defined]
        kind.asked.clear()  # type: ignore[attr-defined]


@test
def the_array_interface_of_cuda() -> None:
    class Interface:
        def __init__(self, row: np.ndarray[Any, Any], **changes: Any) -> None:
            about = {
                "shape": row.shape,
                "typestr": "<f4",
                "data": (row.ctypes.data, False),
                "strides": None,
                "version": 3,
            }
            self.__cuda_array_interface__ = about | changes

    program = executable()
    rows = arrays()
    library.own_address(ctypes.c_uint64(rows[0].ctypes.data), 0)
    program.execute(
        views(rows) | {KEYS[0]: Interface(rows[0], stream=OTHER)}, None, cudnn_jax.create_handle(stream=STREAM)
    )
    check(rows)
    seen = journal()
    assert f"record on {OTHER:x}; wait on {STREAM:x}; " in seen, seen
    wrong = {
        "the buffer is float64": {"typestr": "<f8"},
        "its element type is >f4": {"typestr": ">f4"},
        "the buffer has (2,)": {"strides": (8,)},
        "no multiples of its elements": {"strides": (6,)},
        "the buffer has (3,)": {"shape": (3,)},
        "breaks its protocol": {"shape": "x"},
        "its element type is <fx, the rule is 1 to 16 bytes": {"typestr": "<fx"},
        "it has a mask": {"mask": rows[1]},
        "its shape has -64": {"shape": (-64,)},
        "holds no address": {"data": None},
    }
    for message, change in wrong.items():
        raises(ValueError, message, lambda: program.execute(views(rows) | {KEYS[0]: Interface(rows[0], **change)}))
    library.own_address(ctypes.c_uint64(rows[0].ctypes.data), 1)
    message = "the graph runs on cuda:0, the buffer is on cuda:1"
    raises(ValueError, message, lambda: program.execute(views(rows) | {KEYS[0]: Interface(rows[0])}))


@test
def a_graph_is_planned_for_the_handles_device() -> None:
    from cudnn_jax.engines import execution

    target = execution.target_of(cudnn_jax.create_handle(1))
    assert (target.platform, target.device_kind, target.sm, target.sm_count, target.ordinal) == (
        "cuda",
        "Recorded 80",
        80,
        131,
        1,
    )
    assert execution.target_of(None).ordinal == 0


if __name__ == "__main__":
    library = ctypes.CDLL(sys.argv[1])
    cudnn_jax.create_handle()  # looks for wheels, whose place the recording library takes
    _ffi.set_library_candidates({"cuda": [sys.argv[1]], "cudnn": [sys.argv[1]]})
    tests[sys.argv[2]]()
    print("passed")
