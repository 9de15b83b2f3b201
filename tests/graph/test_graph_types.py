"""data_type: names, sizes, and the dtypes of other libraries."""

from __future__ import annotations

import pytest

from cudnn_jax.graph import GraphValidationError, data_type

REAL = [kind for kind in data_type if kind is not data_type.NOT_SET]


@pytest.mark.parametrize("kind", REAL)
def test_a_type_is_found_by_itself_its_value_and_its_name(kind) -> None:
    assert data_type.of(kind) is data_type.of(kind.value) is data_type.of(kind.name) is kind


@pytest.mark.parametrize("kind", [kind for kind in REAL if kind is not data_type.FP4_E2M1])
def test_a_type_is_found_by_numpys_and_jaxs_dtypes(kind) -> None:
    jnp = pytest.importorskip("jax.numpy")
    dtype = jnp.dtype(kind.value)
    assert data_type.of(dtype) is kind
    assert data_type.of(dtype.type) is kind
    assert kind.itemsize_bits == dtype.itemsize * 8


def test_jaxs_scalar_types_are_types() -> None:
    jnp = pytest.importorskip("jax.numpy")
    assert data_type.of(jnp.bfloat16) is data_type.BFLOAT16
    assert data_type.of(jnp.float8_e4m3fn) is data_type.FP8_E4M3


def test_a_dtype_that_says_its_name_in_words_is_a_type() -> None:
    class Torch:
        def __repr__(self) -> str:
            return "torch.bfloat16"

    assert data_type.of(Torch()) is data_type.BFLOAT16


def test_small_types_count_in_bits() -> None:
    assert data_type.FP4_E2M1.itemsize_bits == 4
    assert {kind.value: kind.itemsize_bits for kind in REAL if not kind.is_floating} == {
        "int8": 8,
        "uint8": 8,
        "int32": 32,
        "int64": 64,
        "bool": 8,
    }


def test_integers_are_the_range_of_the_type() -> None:
    assert data_type.INT8.integers == range(-128, 128)
    assert data_type.UINT8.integers == range(256)
    assert data_type.BOOLEAN.integers == range(2)
    assert data_type.INT64.integers == range(-(2**63), 2**63)


def test_none_is_not_set() -> None:
    assert data_type.of(None) is data_type.of(data_type.NOT_SET) is data_type.NOT_SET


@pytest.mark.parametrize("wrong", ["float", "complex64", "not_set", 3, object(), [], "torch.float32x"])
def test_what_is_no_type_is_refused_with_the_list(wrong) -> None:
    with pytest.raises(GraphValidationError, match="is not a data type; the rule: one of float32, float16, bfloat16"):
        data_type.of(wrong)
