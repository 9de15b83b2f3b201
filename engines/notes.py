"""What a plan's engine says of its numbers and its behaviour, in the words of cuDNN's frontend."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar


class numerical_note(StrEnum):
    """How an engine computes."""

    TENSOR_CORE = "TENSOR_CORE"
    DOWN_CONVERT_INPUTS = "DOWN_CONVERT_INPUTS"
    REDUCED_PRECISION_REDUCTION = "REDUCED_PRECISION_REDUCTION"
    FFT = "FFT"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    WINOGRAD = "WINOGRAD"
    WINOGRAD_TILE_4x4 = "WINOGRAD_TILE_4x4"
    WINOGRAD_TILE_6x6 = "WINOGRAD_TILE_6x6"
    WINOGRAD_TILE_13x13 = "WINOGRAD_TILE_13x13"
    STRICT_NAN_PROP = "STRICT_NAN_PROP"


class behavior_note(StrEnum):
    """What an engine needs or allows when it is built and run."""

    RUNTIME_COMPILATION = "RUNTIME_COMPILATION"
    REQUIRES_FILTER_INT8x32_REORDER = "REQUIRES_FILTER_INT8x32_REORDER"
    REQUIRES_BIAS_INT8x32_REORDER = "REQUIRES_BIAS_INT8x32_REORDER"
    SUPPORTS_CUDA_GRAPH_NATIVE_API = "SUPPORTS_CUDA_GRAPH_NATIVE_API"
    CUBLASLT_DEPENDENCY = "CUBLASLT_DEPENDENCY"


Note = TypeVar("Note", numerical_note, behavior_note)


def parse(caller: str, notes: Iterable[Note | str], kind: type[Note]) -> frozenset[str]:
    """The names of `notes`.

    Raises:
      TypeError: `notes` is one note, where a sequence is asked for.
      ValueError: something is no note of `kind`; the message lists what is.
    """
    if isinstance(notes, str):
        raise TypeError(f"{caller}({notes!r}): the rule: a sequence of notes")
    given = [str(note) for note in notes]
    for name in given:
        if name not in kind.__members__:
            raise ValueError(f"{caller}: {name!r} is none of {', '.join(kind.__members__)}")
    return frozenset(given)
