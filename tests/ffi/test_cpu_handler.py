"""The custom call on the CPU platform, from jit to the steps and back."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ffi_programs import buffer, call, fill, host, payload, seal

from cudnn_jax import _ffi

RegisterHost = Callable[..., None]


def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def axpy_program(shape: tuple[int, ...], scale: float) -> bytes:
    steps = [
        {"kind": "fill", "dest": ["workspace", 0], "value": 1, "width": 1, "bytes": 256},
        host("axpy", ["operand", 0], ["operand", 1], ["operand", 2], ["immediate", ["float32", scale]]),
    ]
    operands = [buffer("float32", *shape)] * 3
    return seal(payload(inputs=operands[:2], outputs=operands[2:], steps=steps, workspace=256))


def axpy(shape: tuple[int, ...], scale: float) -> Callable[[Any, Any], jax.Array]:
    artifact = axpy_program(shape, scale)

    def run(a: Any, b: Any) -> jax.Array:
        out, _ = call(artifact, [struct(shape, jnp.float32), struct((256,), jnp.uint8)], a, b)
        return out

    return run


def test_fill_writes_words() -> None:
    program = seal(payload(outputs=[buffer("float32", 5)], steps=[fill(0, 0xFF800000, 20, width=4)]))
    np.testing.assert_array_equal(jax.jit(lambda: call(program, [struct((5,), jnp.float32)]))()[0], -np.inf)


def test_fill_writes_its_bytes_and_no_others() -> None:
    program = seal(payload(outputs=[buffer("uint8", 3, 5)] * 2, steps=[fill(0, 9, 15), fill(1, 9, 15), fill(1, 4, 7)]))
    full, part = jax.jit(lambda: call(program, [struct((3, 5), jnp.uint8)] * 2))()
    assert np.array_equal(full, np.full((3, 5), 9))
    assert np.array_equal(np.ravel(part), [4] * 7 + [9] * 8)


def test_a_host_step_reads_and_writes_its_operands(register_host: RegisterHost, rng: np.random.Generator) -> None:
    register_host("axpy")
    a, b = rng.standard_normal((2, 6, 7), dtype=np.float32)
    run = jax.jit(lambda a, b: axpy((6, 7), 0.5)(a, b + 1) * 2)
    np.testing.assert_allclose(run(a, b), (a * 0.5 + b + 1) * 2, rtol=1e-6, atol=1e-6)


def test_a_step_is_told_the_size_of_each_argument(register_host: RegisterHost) -> None:
    register_host("sizes")
    args = [["operand", 1], ["operand", 0], ["workspace", 256], ["immediate", ["int32", 1]]]
    content = payload([buffer("bfloat16", 3, 5)], [buffer("int64", 4)], [host("sizes", *args)], workspace=1024)
    results = [struct((4,), jnp.int64), struct((1024,), jnp.uint8)]
    with jax.enable_x64(True):
        out, _ = jax.jit(lambda x: call(seal(content), results, x))(jnp.ones((3, 5), jnp.bfloat16))
        assert out.tolist() == [32, 30, 768, 4]


def test_two_threads_run_one_program_on_their_own_buffers(
    register_host: RegisterHost, rng: np.random.Generator
) -> None:
    register_host("slow_copy")
    spec = [buffer("int32", 1000)]
    program = seal(payload(spec, spec, [host("slow_copy", ["operand", 0], ["operand", 1])]))
    run = jax.jit(lambda x: call(program, struct((1000,), jnp.int32), x))
    inputs = [jax.device_put(rng.integers(0, 2**31, 1000, np.int32), jax.devices("cpu")[0]) for _ in range(8)]
    compiled = run.lower(inputs[0]).compile()
    outputs: dict[int, np.ndarray] = {}
    barrier = threading.Barrier(len(inputs))

    def work(index: int) -> None:
        barrier.wait()
        outputs[index] = np.asarray(compiled(inputs[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, given in enumerate(inputs):
        assert np.array_equal(outputs[index], given)


F32 = struct((4,), jnp.float32)
REFUSED: dict[str, tuple[int, list[jax.ShapeDtypeStruct], Callable[[jax.Array], list[jax.Array]], str]] = {
    # name: workspace of the program, results of the call, operands of the call, message
    "no input": (
        0,
        [F32],
        lambda x: [],
        "has 1 inputs and 1 outputs, the call passes 0 inputs and 1 results",
    ),
    "a result more": (0, [F32, F32], lambda x: [x], "the call passes 1 inputs and 2 results"),
    "input shape": (
        0,
        [F32],
        lambda x: [x[:3]],
        "input 0: the program has float32[4], the call passes float32[3]",
    ),
    "input rank": (0, [F32], lambda x: [x[None]], "the program has float32[4], the call passes float32[1,4]"),
    "input dtype": (0, [F32], lambda x: [x.astype(jnp.int32)], "has float32[4], the call passes int32[4]"),
    "output dtype": (0, [struct((4,), jnp.bfloat16)], lambda x: [x], "output 0: the program has float32[4]"),
    "complex": (0, [struct((4,), jnp.complex64)], lambda x: [x], "float32[4], the call passes dtype 15[4]"),
    "no workspace": (
        512,
        [F32],
        lambda x: [x],
        "the program has 1 inputs and 1 outputs and a workspace, the",
    ),
    "workspace size": (
        512,
        [F32, struct((511,), jnp.uint8)],
        lambda x: [x],
        "workspace: the program has uint8[512], the call passes uint8[511]",
    ),
}


def one_in_one_out(workspace: int = 0) -> bytes:
    content = payload([buffer("float32", 4)], [buffer("float32", 4)], [fill(1, 0, 16)], workspace=workspace)
    return seal(content)


@pytest.mark.parametrize("case", REFUSED)
def test_operands_that_do_not_fit_are_refused_before_anything_runs(case: str) -> None:
    workspace, results, operands, message = REFUSED[case]
    before = _ffi.counters()["executions"]
    run = jax.jit(lambda x: call(one_in_one_out(workspace), results, *operands(x)))
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.block_until_ready(run(jnp.ones(4)))
    assert "cudnn_jax.program: " in str(raised.value) and message in str(raised.value)
    assert _ffi.counters()["executions"] == before
    assert np.array_equal(jax.jit(lambda x: call(one_in_one_out(), F32, x))(jnp.ones(4)), [0] * 4)


def test_a_program_for_another_platform_is_refused() -> None:
    spec = [buffer("float32", 4)]
    content = payload(spec, spec, [fill(1, 0, 16)], workspace=512, platform="cuda", arch=90)
    results = [struct((4,), jnp.float32), struct((512,), jnp.uint8)]
    message = r"payload\.requires\.platform: the program is for cuda, this call runs on cpu"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.jit(lambda x: call(seal(content), results, x))(jnp.ones(4))


def test_a_damaged_artifact_is_an_error_that_names_the_field() -> None:
    damaged = bytearray(one_in_one_out())
    damaged[-1] ^= 1
    cases = {bytes(damaged): "artifact.sha256", bytes(damaged[:40]): "artifact: not valid MessagePack"}
    for artifact, message in cases.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"cudnn_jax.program: {message}"):
            jax.jit(lambda x, artifact=artifact: call(artifact, struct((4,), jnp.float32), x))(jnp.ones(4))


@pytest.mark.parametrize("attributes", [{}, {"program": "text"}, {"program": np.zeros(3, np.int32)}])
def test_a_call_without_a_program_is_refused(attributes: dict[str, Any]) -> None:
    target = jax.ffi.ffi_call("cudnn_jax.program", struct((4,), jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="attribute program: expected an array of uint8"):
        jax.jit(lambda: target(**attributes))()


def test_an_unknown_symbol_is_named() -> None:
    program = seal(payload(outputs=[buffer("float32", 4)], steps=[host("no_such_function", ["operand", 0])]))
    message = r'payload\.steps\[0\]\.symbol: "no_such_function" is not registered'
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.jit(lambda: call(program, struct((4,), jnp.float32)))()


def test_a_null_symbol_is_refused() -> None:
    with pytest.raises(ValueError, match="address: got 0"):
        _ffi.register_host_symbol("null", 0)


def test_a_symbol_may_be_a_python_callback() -> None:
    seen: list[int] = []

    @ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int64), ctypes.c_int64)
    def note(args: Any, nbytes: Any, count: int) -> None:
        seen.extend(nbytes[:count])

    address = ctypes.cast(note, ctypes.c_void_p).value
    assert address is not None
    _ffi.register_host_symbol("note", address)
    program = seal(payload(outputs=[buffer("float32", 4)], steps=[fill(0, 0, 16), host("note", ["operand", 0])]))
    assert np.array_equal(jax.jit(lambda: call(program, struct((4,), jnp.float32)))(), [0] * 4)
    assert seen == [16]


def test_equal_programs_are_one_object_and_all_are_released(register_host: RegisterHost) -> None:
    register_host("axpy")
    jax.clear_caches()
    gc.collect()
    before = _ffi.counters()
    assert before["programs_created"] == before["programs_destroyed"]
    assert before["states_created"] == before["states_destroyed"]

    x = jnp.ones((3, 3))
    same = [jax.jit(lambda a, b: axpy((3, 3), 2.0)(a, b)) for _ in range(3)]
    other = jax.jit(lambda a, b: axpy((3, 3), 3.0)(a, b))
    for run in (*same, other):
        jax.block_until_ready(run(x, x))
    during = _ffi.counters()
    assert during["states_created"] - before["states_created"] == 4
    assert during["programs_created"] - before["programs_created"] == 2
    assert during["loads"] - before["loads"] == 2
    assert during["executions"] - before["executions"] == 4
    assert during["handler_ns"] > before["handler_ns"]

    del same, other, run
    jax.clear_caches()
    gc.collect()
    after = _ffi.counters()
    assert after["programs_created"] == after["programs_destroyed"] == during["programs_created"]
    assert after["states_created"] == after["states_destroyed"] == during["states_created"]


def test_gradients_loops_and_many_devices(register_host: RegisterHost) -> None:
    """The call inside the transformations of a real program: a scan, and one copy per device."""
    register_host("axpy")
    step = axpy((4,), 0.5)
    final, _ = jax.lax.scan(lambda carry, x: (step(carry, x), None), jnp.zeros(4), jnp.ones((10, 4)))
    np.testing.assert_allclose(final, np.full(4, 2 - 2.0**-9), rtol=1e-6)
    for device in jax.devices("cpu"):
        x = jax.device_put(jnp.ones(4), device)
        out = jax.jit(step)(x, x)
        assert out.devices() == {device}
        np.testing.assert_allclose(out, np.full(4, 1.5))
