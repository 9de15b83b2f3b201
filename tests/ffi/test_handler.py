"""The XLA handlers called without XLA: contexts, refusals, costs, and 16 threads with 10,000 calls each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import native
import numpy as np
import pytest
from ffi_programs import buffer, call, fill, host, payload, seal

pytestmark = pytest.mark.native

THREADS, CALLS = 16, 10_000


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread", ""])
def test_the_handlers_under_a_sanitizer(
    sanitized: Callable[[str], native.Build], tmp_path: Path, cute_object: Path, sanitizer: str
) -> None:
    build = sanitized(sanitizer)
    handlers = build.compile("handlers", [native.ROOT / "ffi" / "xla_handlers.cc"])
    library = native.library(tmp_path, "recording_cute.c")
    native.run(build.program("handler_test.cc", build.core, handlers), library, cute_object, CALLS, timeout=600)


def test_many_python_threads_call_one_program(register_host: Callable[..., None], rng: np.random.Generator) -> None:
    register_host("axpy")
    spec = buffer("float32", 16)
    args = [["operand", 0], ["operand", 1], ["operand", 2], ["immediate", ["float32", 0.5]]]
    steps = [fill(2, 255, 64), host("axpy", *args)]
    program = seal(payload([spec, spec], [spec], steps))
    run = jax.jit(lambda a, b: call(program, jax.ShapeDtypeStruct((16,), jnp.float32), a, b))
    given = rng.integers(-1000, 1000, (THREADS, 2, 2, 16)).astype(np.float32)
    compiled = run.lower(given[0, 0, 0], given[0, 0, 1]).compile()
    finished: list[int] = []

    def work(index: int) -> None:
        cases = [(jnp.asarray(a), jnp.asarray(b), a * np.float32(0.5) + b) for a, b in given[index]]
        for turn in range(CALLS):
            a, b, expected = cases[turn % len(cases)]
            assert np.array_equal(compiled(a, b), expected)
        finished.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(finished) == list(range(THREADS))
