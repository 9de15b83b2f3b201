"""The float64 formula that float8 attention is held against, here and on a GPU: its gradients, and its tolerance."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import float8


def test_the_formula_is_attention_and_its_gradients(rng: np.random.Generator) -> None:
    given = float8.drawn_backward(rng)
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(given[name] * given[f"descale_{name}"]) for name in "qkv")

        def attend(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.softmax(float8.ATTN_SCALE * q @ k.swapaxes(-1, -2)) @ v

        out, pull = jax.vjp(attend, q, k, v)
        gradients = pull(jnp.asarray(given["dO"] * given["descale_dO"]))
    forward = float8.forward(given)
    np.testing.assert_allclose(forward["O"], np.asarray(out) * given["scale_o"], rtol=1e-9, atol=1e-9)
    # The exact output in the place of the quantised one, whose rounding the gradients hold otherwise.
    backward = float8.backward(given | {"o": forward["O"]})
    for name, wanted in zip(("dQ", "dK", "dV"), gradients, strict=True):
        np.testing.assert_allclose(backward[name], np.asarray(wanted) * given[f"scale_{name}"], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", [float8.E4M3, float8.E5M2])
def test_numbers_of_float8_and_what_lies_between_them(kind: Any) -> None:
    numbers = np.unique(np.arange(256, dtype=np.uint8).view(kind).astype(np.float64))
    numbers = numbers[np.isfinite(numbers)]
    np.testing.assert_array_equal(float8.rounded(numbers, kind), numbers)
    between = (numbers[:-1] + numbers[1:]) / 2
    np.testing.assert_array_equal(float8.rounded(between, kind), between.astype(kind).astype(np.float64))
    for side, expected in ((-1, numbers[:-1]), (1, numbers[1:])):
        beside = between + side * np.abs(between) * 2.0**-40
        beside[between == 0] = side * 2.0**-100
        np.testing.assert_array_equal(float8.rounded(beside, kind), np.where(between == 0, 0, expected))
    np.testing.assert_array_equal(float8.rounded([-1e9, 1e9], kind), numbers[[0, -1]])


@pytest.mark.parametrize(
    ("draw", "compute"), [(float8.drawn, float8.forward), (float8.drawn_backward, float8.backward)]
)
def test_rounding_inside_stays_within_the_tolerance(rng: np.random.Generator, draw: Any, compute: Any) -> None:
    given = draw(rng)
    exact, rounded = compute(given), compute(given, float8.rounded)
    for name, wanted in exact.items():
        got = float8.rounded(rounded[name]) if name in float8.QUANTISED else rounded[name]
        assert np.isfinite(got).all() and np.abs(got).max() > 0
        assert np.linalg.norm(got - wanted) <= float8.TOLERANCE * np.linalg.norm(wanted), name
