from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import native
import pytest

from cudnn_jax import _ffi, _runtime

SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
/* out = a * immediate + b. */
void axpy(void* const* args, const int64_t* nbytes, int64_t n) {
  const float *a = args[0], *b = args[1];
  const float scale = *(const float*)args[3];
  float* out = args[2];
  if (n != 4) abort();
  for (int64_t i = 0; i < nbytes[2] / 4; ++i) out[i] = a[i] * scale + b[i];
}
/* Writes the sizes it was told of. */
void sizes(void* const* args, const int64_t* nbytes, int64_t n) {
  int64_t* out = args[0];
  for (int64_t i = 0; i < n; ++i) out[i] = nbytes[i];
}
/* Copies in two halves with a pause between, so that two threads are in it at once. */
void slow_copy(void* const* args, const int64_t* nbytes, int64_t n) {
  const char* in = args[0];
  char* out = args[1];
  const struct timespec pause = {0, 20000000};
  (void)n;
  for (int64_t i = 0; i < nbytes[0] / 2; ++i) out[i] = in[i];
  nanosleep(&pause, 0);
  for (int64_t i = nbytes[0] / 2; i < nbytes[0]; ++i) out[i] = in[i];
}
"""


@pytest.fixture(scope="session", autouse=True)
def runtime() -> None:
    _runtime.register()


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    """Also where a GPU is the default device."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(scope="session")
def register_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Names the C functions above for "host" steps."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the tests need a C compiler"
    folder: Path = tmp_path_factory.mktemp("host")
    (folder / "host.c").write_text(SOURCE)
    library = folder / "host.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, folder / "host.c"], check=True)
    loaded = ctypes.CDLL(str(library))

    def register(*names: str) -> None:
        for name in names:
            address = ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value
            assert address is not None
            _ffi.register_host_symbol(name, address)

    return register


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], native.Build]:
    """Builds of the C++ core, one per sanitizer, kept for all the tests that ask for it."""

    @functools.cache
    def build(sanitizer: str) -> native.Build:
        return native.Build(tmp_path_factory.mktemp("native"), native.checked(sanitizer))

    return build


@pytest.fixture
def cute_object(tmp_path: Path) -> Path:
    """What CuTe-DSL would export, of functions that run on the host."""
    made = tmp_path / "cute_object.o"
    subprocess.run(["cc", "-c", "-O1", "-fPIC", "-o", made, native.HERE / "cute_object.c"], check=True)
    return made
