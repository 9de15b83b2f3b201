"""Element types, under cuDNN's names."""

from __future__ import annotations

from enum import Enum

from cudnn_jax.graph.errors import GraphValidationError


class data_type(Enum):
    """An element type. The value is the type's name in numpy, jax.numpy and ml_dtypes."""

    FLOAT = "float32"
    HALF = "float16"
    BFLOAT16 = "bfloat16"
    DOUBLE = "float64"
    INT8 = "int8"
    UINT8 = "uint8"
    INT32 = "int32"
    INT64 = "int64"
    BOOLEAN = "bool"
    FP8_E4M3 = "float8_e4m3fn"
    FP8_E5M2 = "float8_e5m2"
    FP8_E8M0 = "float8_e8m0fnu"
    FP4_E2M1 = "float4_e2m1fn"
    NOT_SET = "not_set"

    def __repr__(self) -> str:
        return f"data_type.{self.name}"

    @property
    def itemsize_bits(self) -> int:
        """Bits that one element takes in memory."""
        return _BITS[self]

    @property
    def is_floating(self) -> bool:
        return self.value.startswith(("float", "bfloat"))

    @property
    def integers(self) -> range:
        """The integers that the type holds, for integer and boolean types."""
        bits = 1 if self is data_type.BOOLEAN else self.itemsize_bits
        unsigned = self in (data_type.BOOLEAN, data_type.UINT8)
        return range(2**bits) if unsigned else range(-(2 ** (bits - 1)), 2 ** (bits - 1))

    @classmethod
    def of(cls, x: object) -> data_type:
        """The type that `x` names: a data_type, a string, or a dtype of numpy, jax or torch. None is NOT_SET."""
        if isinstance(x, cls):
            return x
        if x is None:
            return cls.NOT_SET
        for spelling in _spellings(x):
            found = _BY_NAME.get(spelling)
            if found is not None:
                return found
        raise GraphValidationError(f"{x!r} is not a data type; the rule: one of {', '.join(_BY_NAME)}")


_BITS = {
    data_type.FLOAT: 32,
    data_type.HALF: 16,
    data_type.BFLOAT16: 16,
    data_type.DOUBLE: 64,
    data_type.INT8: 8,
    data_type.UINT8: 8,
    data_type.INT32: 32,
    data_type.INT64: 64,
    data_type.BOOLEAN: 8,
    data_type.FP8_E4M3: 8,
    data_type.FP8_E5M2: 8,
    data_type.FP8_E8M0: 8,
    data_type.FP4_E2M1: 4,
}

_BY_NAME = {member.value: member for member in _BITS} | {member.name: member for member in _BITS}


def _spellings(x: object) -> list[str]:
    """The names under which frameworks know a dtype: `dtype.name`, `scalar_type.__name__`, "torch.float32"."""
    named = [x, getattr(x, "name", None), getattr(x, "__name__", None), str(x).rpartition(".")[2]]
    return [text for text in named if isinstance(text, str)]
