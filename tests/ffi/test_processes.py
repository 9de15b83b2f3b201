"""What holds across processes: registration by the entry point, exported functions, the compilation cache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from ffi_programs import buffer, call, fill, payload, seal

pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")


def program(byte: int) -> bytes:
    steps = [fill(1, byte, 16), {"kind": "fill", "dest": ["workspace", 0], "value": 0, "width": 1, "bytes": 64}]
    return seal(payload([buffer("float32", 4)], [buffer("uint8", 4, 4)], steps, workspace=64))


def run_program(x: jax.Array, byte: int = 7) -> jax.Array:
    results = [jax.ShapeDtypeStruct((4, 4), jnp.uint8), jax.ShapeDtypeStruct((64,), jnp.uint8)]
    out: jax.Array = call(program(byte), results, x)[0]
    return out


def python(code: str, *args: str | Path) -> str:
    """The standard output of a new interpreter, which sees one CPU device and must warn of nothing."""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", code, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=Path(__file__).parent, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr.lower(), done.stderr
    return done.stdout


DESERIALISE = """
import sys
import jax
exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
out = jax.jit(exported.call)(jax.numpy.ones(4))
assert "cudnn_jax" not in sys.argv[0]
print(out.tolist())
"""


def test_an_exported_function_runs_where_only_jax_was_imported(tmp_path: Path) -> None:
    checks = [jax.export.DisabledSafetyCheck.custom_call("cudnn_jax.program")]
    exported = jax.export.export(jax.jit(run_program), disabled_checks=checks)(jnp.ones(4))
    file = tmp_path / "exported.bin"
    file.write_bytes(exported.serialize())
    assert python(DESERIALISE, file).strip() == str([[7] * 4] * 4)


REGISTER_COLD = """
import sys
from cudnn_jax import _runtime
_runtime.register()
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
_runtime.register()
from test_processes import run_program
import jax
print(jax.jit(run_program)(jax.numpy.ones(4)).tolist())
"""
REGISTER_WARM = """
import jax
assert jax.devices("cpu")
from cudnn_jax import _runtime
_runtime.register()
from test_processes import run_program
print(jax.jit(run_program)(jax.numpy.ones(4)).tolist())
"""
REGISTER_MANY_THREADS = """
import threading
from cudnn_jax import _runtime
from test_processes import run_program
import jax
results = []
def work():
    _runtime.register()
    results.append(jax.jit(run_program)(jax.numpy.ones(4)).tolist())
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(results) == 8 and all(result == results[0] for result in results)
print(results[0])
"""


@pytest.mark.parametrize("code", [REGISTER_COLD, REGISTER_WARM, REGISTER_MANY_THREADS], ids=["cold", "warm", "threads"])
def test_registration_works_before_and_after_the_backend_starts(code: str) -> None:
    assert python(code).strip() == str([[7] * 4] * 4)


CACHED = """
import sys
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda name, **kw: events.append(name))
from test_processes import run_program
out = jax.jit(run_program)(jax.numpy.ones(4))
assert out.tolist() == [[7] * 4] * 4, out
hits = events.count("/jax/compilation_cache/cache_hits")
misses = events.count("/jax/compilation_cache/cache_misses")
print(hits, misses)
"""


def test_the_second_process_takes_the_executable_from_the_cache(tmp_path: Path) -> None:
    first = [int(word) for word in python(CACHED, tmp_path).split()]
    second = [int(word) for word in python(CACHED, tmp_path).split()]
    assert first[1] > 0
    assert second == [first[0] + first[1], 0]


def test_the_program_is_part_of_the_cache_key(tmp_path: Path) -> None:
    python(CACHED, tmp_path)
    other = CACHED.replace("jax.jit(run_program)", "jax.jit(lambda x: run_program(x, 9))").replace("[7]", "[9]")
    assert int(python(other, tmp_path).split()[1]) > 0


def test_an_interpreter_that_ends_with_programs_alive_ends_cleanly() -> None:
    code = REGISTER_COLD + "\nkeep = jax.jit(run_program).lower(jax.numpy.ones(4)).compile()\nkeep(jax.numpy.ones(4))\n"
    assert re.match(r"\[\[7, 7", python(code))
