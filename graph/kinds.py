"""What an attribute's value may be."""

from __future__ import annotations

from operator import index
from typing import Any

from cudnn_jax.graph.errors import GraphNotSupportedError
from cudnn_jax.graph.operation import Kind
from cudnn_jax.graph.types import data_type


def _flag(value: Any) -> bool:
    if value in (True, False):
        return bool(value)
    raise ValueError


def _number(value: Any) -> float:
    if isinstance(value, str | bytes | bool):
        raise TypeError
    return float(value)


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    made = index(value)
    if made not in data_type.INT64.integers:
        raise ValueError
    return made


def _text(value: Any) -> str:
    named = getattr(value, "name", value)
    if not isinstance(named, str):
        raise TypeError
    return named


def _integers(value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes):
        raise TypeError
    return tuple(_integer(each) for each in value)


def _integers_or_one(value: Any) -> tuple[int, ...]:
    return (_integer(value),) if hasattr(value, "__index__") else _integers(value)


def _slices(value: Any) -> tuple[tuple[int, int, int], ...]:
    return tuple(_slice(each) for each in value)


def _slice(value: Any) -> tuple[int, int, int]:
    parts = (value.start or 0, value.stop, value.step) if isinstance(value, slice) else tuple(value)
    start, stop, *step = parts
    return _integer(start), _integer(stop), _integer(step[0]) if step and step[0] is not None else 1


flag = Kind("bool", "True or False", _flag)
number = Kind("float", "a number that float64 holds", _number)
integer = Kind("int", "an integer that int64 holds", _integer)
text = Kind("str", "a string", _text)
integers = Kind("Sequence[int]", "a sequence of integers that int64 holds", _integers)
integers_or_one = Kind(
    "Sequence[int] | int", "an integer, or a sequence of integers, that int64 holds", _integers_or_one
)
slices = Kind("Sequence[Any]", "for each axis (start, stop) or (start, stop, step), or a slice", _slices)


def choice(*names: str, absent: str | None = None) -> Kind:
    """One of `names`, in any case, or an enum member of that name; `absent` counts as not given."""

    def parse(value: Any) -> str | None:
        spelled = str(getattr(value, "name", value)).upper()
        if spelled not in names:
            raise ValueError
        return None if spelled == absent else spelled

    return Kind("str", "one of " + ", ".join(map(repr, names)), parse)


def unserved(why: str) -> Kind:
    """A keyword of the surface that this graph cannot hold."""

    def parse(value: Any) -> None:
        raise GraphNotSupportedError(why)

    return Kind("Any", why, parse)
