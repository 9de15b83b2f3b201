"""Programs whose outputs and workspace are filled with NaN first, so that what a kernel leaves unwritten shows.

An output that is an input written over holds what it was given, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import pytest

from cudnn_jax.engines import planning
from cudnn_jax.engines.base import Program
from cudnn_jax.engines.program import ProgramBuilder
from cudnn_jax.graph import Tensor, data_type

ALL_ONES = 0xFF
"""In every byte, a NaN in each floating type."""


@contextmanager
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every program built inside begins with fills of all that it may write."""
    build = ProgramBuilder.build

    def poisoning(self: ProgramBuilder) -> Program:
        payload = self._payload
        first = len(payload["inputs"])
        fills = [
            {"kind": "fill", "dest": ("operand", first + at), "value": ALL_ONES, "width": 1, "bytes": _nbytes(operand)}
            for at, operand in enumerate(payload["outputs"])
            if not _is_given(self._tensors[first + at])
        ]
        if payload["workspace"]:
            fills.append(
                {"kind": "fill", "dest": ("workspace", 0), "value": ALL_ONES, "width": 1, "bytes": payload["workspace"]}
            )
        payload["steps"][:0] = fills
        return build(self)

    planning.clear_memo()
    with monkeypatch.context() as patch:
        patch.setattr(ProgramBuilder, "build", poisoning)
        yield
    planning.clear_memo()


def _is_given(tensor: Tensor) -> bool:
    node = tensor.producer
    return node is not None and any(node.outputs[name] is tensor for name in node.written_over)


def _nbytes(operand: dict[str, object]) -> int:
    return prod(operand["shape"]) * data_type.of(operand["dtype"]).itemsize_bits // 8  # type: ignore[call-overload]
