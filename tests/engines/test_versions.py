"""Versions of what programs run on, in one place."""

from __future__ import annotations

import pytest

import cudnn_jax
from cudnn_jax import _ffi
from cudnn_jax.engines import versions


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> int:
        raise _ffi.LibraryNotFound("libcuda could not be opened,\ntried: nothing")

    monkeypatch.setitem(versions._ASKED, "cuda_driver", absent)
    monkeypatch.setitem(versions._ASKED, "cudnn", lambda: 91900)
    monkeypatch.setitem(versions._ASKED, "cutedsl", lambda: "4.8.1")
    found = cudnn_jax.versions()
    assert (found.cuda_driver, found.cudnn, found.cutedsl) == (None, 91900, "4.8.1")
    assert found.missing == {"cuda_driver": "libcuda could not be opened, tried: nothing"}
    assert (found.cudnn_frontend, found.xla_ffi) == (_ffi.CUDNN_FRONTEND_VERSION, _ffi.XLA_FFI_API_VERSION)


def test_each_is_a_version_or_has_a_reason() -> None:
    found = cudnn_jax.versions()
    for name in ("cuda_driver", "cudnn", "cutedsl"):
        assert (getattr(found, name) is None) == (name in found.missing)
