"""CuTe-DSL compilation: the same bytes wherever and whenever, targets pinned, the process left as it was."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cudnn_jax.engines import cutedsl, versions
from cudnn_jax.graph import GraphNotSupportedError, data_type
from support.cute_objects import compiled

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is what is tested")

X86_64, AARCH64 = 62, 183
"""Machines of ELF files."""


def in_a_child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    env = os.environ | {"PYTHONPATH": paths} | environment
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done


def digest_in_a_child(before: str = "", **environment: str) -> str:
    code = f"from support.cute_objects import compiled\nimport hashlib\n{before}\n"
    return in_a_child(f"{code}print(hashlib.sha256(compiled().data).hexdigest())", **environment).stdout.split()[-1]


def test_bytes_are_the_same_in_every_process_and_after_other_compilations() -> None:
    here = hashlib.sha256(compiled().data).hexdigest()
    assert digest_in_a_child(PYTHONHASHSEED="1") == here
    # Another hash seed, kernels and architectures before it, and an architecture in the environment.
    before = "compiled(80); compiled(90, 7, 13)"
    assert digest_in_a_child(before, PYTHONHASHSEED="2", CUTE_DSL_ARCH="sm_100a") == here


def test_an_object_is_for_its_target() -> None:
    made = {sm: compiled(sm) for sm in (80, 89, 90, 100, 120)}
    assert len({each.data for each in made.values()}) == 5
    for chip, each in zip(("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"), made.values(), strict=True):
        assert f"-arch {chip} ".encode() in each.data
        assert (each.function, each.version) == ("bias_gelu", versions.cutedsl())


def test_host_code_is_for_the_baseline_of_a_named_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, number in (("x86_64", X86_64), ("aarch64", AARCH64)):
        monkeypatch.setattr(cutedsl.platform, "machine", lambda machine=machine: machine)
        assert struct.unpack_from("<H", compiled().data, 18) == (number,)


def test_an_unknown_architecture_is_a_decline() -> None:
    with pytest.raises(GraphNotSupportedError, match="architecture sm_75, unknown to nvidia-cutlass-dsl"):
        compiled(75)


def test_the_process_is_left_as_it_was() -> None:
    def hook(*args: object) -> None:
        return None

    from cutlass.cutlass_dsl import CuTeDSL

    before, sys.excepthook = sys.excepthook, hook
    try:
        environment = CuTeDSL._get_dsl().envar
        pinned = environment._arch
        compiled()
        assert sys.excepthook is hook
        assert environment._arch == pinned
        with pytest.raises(GraphNotSupportedError):
            compiled(75)
        assert environment._arch == pinned
    finally:
        sys.excepthook = before


def test_no_driver_is_asked_and_no_runtime_loaded() -> None:
    in_a_child(
        "import cuda.bindings.driver as driver\n"
        "asked = []\n"
        "def refuse(*args): asked.append(args); return (driver.CUresult.CUDA_ERROR_NO_DEVICE,)\n"
        "driver.cuInit = driver.cuDeviceGetCount = driver.cuCtxGetCurrent = refuse\n"
        "from support.cute_objects import compiled\n"
        "assert compiled().data and not asked, asked\n"
        "assert 'libcute_dsl_runtime' not in open('/proc/self/maps').read()"
    )


def test_importing_the_dsl_keeps_the_excepthook() -> None:
    in_a_child(
        "import sys; before = sys.excepthook\n"
        "from cudnn_jax.engines import cutedsl\n"
        "cutedsl.kernels('cudnn_jax.engines.pointwise._bias_gelu_cutedsl')\n"
        "assert 'cutlass' in sys.modules\n"
        "assert sys.excepthook is before"
    )


def test_jax_traces_and_compiles_while_kernels_are_compiled() -> None:
    import jax
    import jax.numpy as jnp

    want = compiled().data
    stop = threading.Event()

    def busy() -> int:
        turns = 0
        while not stop.is_set() or turns == 0:
            turns += 1
            x = jnp.ones((8 + turns % 5, 8))
            assert jax.jit(lambda x, n=turns: jnp.sum(jnp.sin(x) * 0 + n))(x) == x.size * turns
        return turns

    with ThreadPoolExecutor(4) as pool:
        jax_turns = pool.submit(busy)
        objects = list(pool.map(lambda _: compiled().data, range(6)))
        stop.set()
        assert jax_turns.result() >= 1
    assert set(objects) == {want}


def test_available_judges_versions_and_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cutedsl.available()
    monkeypatch.setattr(cutedsl, "MINIMUM", (99, 0, 0))
    with pytest.raises(ImportError, match=r"needs 99\.0\.0 or newer"):
        cutedsl.available()
    monkeypatch.undo()
    monkeypatch.setattr(cutedsl.platform, "machine", lambda: "riscv64")
    with pytest.raises(ImportError, match="on riscv64, serves x86_64 and aarch64"):
        cutedsl.available()
    in_a_child(
        "import sys\nfrom cudnn_jax.engines import cutedsl\ncutedsl.available()\nassert 'cutlass' not in sys.modules"
    )


def test_element_types() -> None:
    for kind in (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16):
        assert cutedsl.element_type(kind).width == kind.itemsize_bits
