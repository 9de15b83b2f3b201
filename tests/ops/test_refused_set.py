"""What `sdpa` refuses is what its rules make illegal, and nothing else: drawn calls, each choice known to be one or the
other. A legal call traces and lowers, forward and backward. An illegal one raises while tracing, with the rule in its message.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn_jax

B, T, S, N, NK, D = 2, 5, 7, 4, 2, 8
FLOATS = ("float32", "bfloat16", "float16")

Shape = tuple[int, ...]


SHAPES: dict[str, tuple[list[Shape | None], list[Shape]]] = {
    "query": ([(B, T, N, D)], [(B, T, 3, D), (B, T, D), (B, T, N, D, 1), (B, T, 0, D), (3, T, N, D)]),
    "key": ([(B, S, NK, D)], [(B, S, NK, 4), (1, S, NK, D), (B, S, 3, D), (S, NK, D)]),
    "value": ([(B, S, NK, D), (B, S, NK, 16)], [(B, T, NK, D), (B, S, N, D), (B, S, NK, 0)]),
    "bias": ([None, (B, N, T, S), (1, 1, T, S), (B, 1, 1, 1)], [(N, T, S), (B, NK, T, S), (B, N, S, T)]),
    "mask": ([None, (B, N, T, S), (1, 1, 1, S)], [(T, S), (B, N, T, 3)]),
    "query_seq_lengths": ([None, (B,)], [(3,), (B, 1), ()]),
    "key_value_seq_lengths": ([None, (B,)], [(1,), (T,)]),
}
"""Argument -> legal shapes and illegal ones, whatever the others are. None leaves it out."""

TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bias": (FLOATS, ("int32", "bool")),
    "mask": (("bool",), ("float32", "int32")),
    "query_seq_lengths": (("int32", "uint8"), ("float32", "bool")),
    "key_value_seq_lengths": (("int32", "int16"), ("bfloat16",)),
}

OPTIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "scale": ([None, 0.5, 2, -1.0, np.float32(0.25)], ["1", float("inf"), float("nan"), (1.0,)]),
    "is_causal": ([False, True, np.True_], [None, "no", 1]),
    "deterministic": ([False, True], [0]),
    "causal_alignment": (["top_left", "bottom_right"], ["left", None]),
    "local_window_size": ([None, 3, 0, -1, (2, None), (-1, 4), [1, 1]], [-2, 1.5, (1, 2, 3), "2", (1, -3), True]),
    "implementation": ([None, "xla"], [1]),
}


def _choice(draw: Any, legal: Any, illegal: Any, spoil: bool) -> Any:
    return draw(st.sampled_from(illegal if spoil and illegal else legal))


@st.composite
def calls(draw: Any) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, Any], str | None]:
    """(arrays, options, the argument that is illegal or None)."""
    spoilt = draw(st.sampled_from([None, *SHAPES, *TYPES, *OPTIONS]))
    by_type = draw(st.booleans())
    io = draw(st.sampled_from(FLOATS))
    arrays: dict[str, jax.ShapeDtypeStruct] = {}
    for name, (legal, illegal) in SHAPES.items():
        at_fault = spoilt == name
        wrong_type = at_fault and (by_type or name not in SHAPES) and name in TYPES
        shape = _choice(draw, legal, illegal, at_fault and not wrong_type)
        if wrong_type and shape is None:
            shape = next(each for each in legal if each is not None)
        if shape is None:
            continue
        dtype = _choice(draw, *TYPES[name], wrong_type) if name in TYPES else io
        arrays[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    options = {name: _choice(draw, legal, bad, spoilt == name) for name, (legal, bad) in OPTIONS.items()}
    return arrays, options, spoilt


@settings(max_examples=120, deadline=None)
@given(calls())
def test_exactly_the_illegal_calls_raise(call: Any) -> None:
    arrays, options, spoilt = call

    def loss(floats: dict[str, Any], rest: dict[str, Any]) -> Any:
        return cudnn_jax.sdpa(**floats, **rest, **options).astype(jnp.float32).sum()

    floats = {name: each for name, each in arrays.items() if name in ("query", "key", "value")}
    rest = {name: each for name, each in arrays.items() if name not in floats}
    if spoilt is None:
        jax.jit(jax.grad(loss)).lower(floats, rest)
    else:
        with pytest.raises((TypeError, ValueError), match="the rule|heads"):
            jax.eval_shape(loss, floats, rest)
