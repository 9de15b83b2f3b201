"""Registration with JAX, and where libraries are looked for."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from cudnn_jax import _ffi, _runtime
from cudnn_jax.engines import libraries


def test_the_entry_point_is_the_runtime() -> None:
    ours = [point for point in entry_points(group="jax_plugins") if point.name == "cudnn_jax"]
    assert [point.value for point in ours] == ["cudnn_jax._runtime"]
    ours[0].load().initialize()


def test_the_running_jaxlib_is_new_enough() -> None:
    running = _runtime._running_api_version()
    assert running is not None
    assert running[0] == _ffi.XLA_FFI_API_VERSION[0] and running[1] >= _ffi.XLA_FFI_API_VERSION[1]


@pytest.mark.parametrize("running", [(0, 2), (1, 3), (1, 0)])
def test_an_older_or_other_ffi_is_refused_with_both_versions(running: tuple[int, int]) -> None:
    with pytest.raises(RuntimeError) as raised:
        _runtime._check_api_version(running)
    assert f"jaxlib speaks XLA FFI {running[0]}.{running[1]}, cudnn_jax is for 0.3" in str(raised.value)


@pytest.mark.parametrize("running", [(0, 3), (0, 5), None])
def test_the_same_or_a_newer_ffi_is_accepted(running: tuple[int, int] | None) -> None:
    _runtime._check_api_version(running)


def test_wheel_folders_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("cudnn_first", "cudnn_second"):
        library = tmp_path / "wheels" / package / "lib" / "libcudnn.so.9"
        library.parent.mkdir(parents=True)
        library.touch()
        (library.parents[1] / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    packages = ("wheels.cudnn_second", "wheels.absent", "absent.cudnn", "wheels.cudnn_first")
    monkeypatch.setattr(libraries, "_WHEELS", {"cudnn": (packages, "libcudnn.so*")})
    folder = tmp_path / "wheels"
    assert libraries.candidates() == {
        "cudnn": [str(folder / name / "lib" / "libcudnn.so.9") for name in ("cudnn_second", "cudnn_first")]
    }
    assert "wheels.cudnn_second" not in sys.modules


LIBRARY_ORDER = """
import sys
from cudnn_jax import _ffi
try:
    _ffi.cuda_driver_version()
except _ffi.LibraryNotFound as error:
    assert isinstance(error, ImportError)
    print(error)
_ffi.set_library_candidates({"cuda": ["/nowhere/libcuda.so.1", sys.argv[1]]})
print(_ffi.cuda_driver_version())
"""
DRIVER = """
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
"""


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="a real driver would be found first")
def test_a_missing_driver_names_what_was_tried_and_a_candidate_is_opened(tmp_path: Path) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libthis_driver.so"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    command = [sys.executable, "-c", LIBRARY_ORDER, library]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    missing, version = done.stdout.splitlines()
    assert missing.startswith("libcuda could not be opened, tried: libcuda.so.1 (") and "; libcuda.so (" in missing
    assert version == "13000"
