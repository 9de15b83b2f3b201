"""64-bit types inside JAX, which narrows them in silence unless it is in its 64-bit mode."""

from __future__ import annotations

from collections.abc import Iterable

from cudnn_jax.graph import GraphNotSupportedError, data_type


def check(dtypes: Iterable[data_type]) -> None:
    """Called while a function of arrays of these types is traced: the mode may be another one when it is built.

    Raises:
      GraphNotSupportedError: one of the types has 64 bits, and JAX is not in its 64-bit mode.
    """
    import jax

    wide = sorted({dtype.value for dtype in dtypes if dtype.itemsize_bits == 64})
    if wide and not jax.config.values["jax_enable_x64"]:
        raise GraphNotSupportedError(f"data type {' and '.join(wide)}, needs JAX's 64-bit mode (jax_enable_x64)")
