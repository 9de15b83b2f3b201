"""Random graphs of pointwise, matmul and reduction nodes: recipes, graphs made of them, and their value in numpy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from cudnn_jax.graph import Tensor, pygraph

SHAPES = ((2, 3, 3), (1, 3, 3), (2, 1, 3), (2, 3, 1))
UNARY = {"neg": "negative", "tanh": "tanh", "abs": "abs"}
BINARY = {"add": "add", "sub": "subtract", "mul": "multiply", "max": "maximum"}
FOLDS = {"ADD": "sum", "MAX": "max", "AVG": "mean"}
"""Operation -> the name of numpy's."""


class Step(NamedTuple):
    """One operation: its kind and name, and what it takes as numbers that are brought into range."""

    kind: str
    name: str
    first: int
    second: int


_number = st.integers(0, 99)
_steps = st.one_of(
    st.builds(Step, st.just("unary"), st.sampled_from(sorted(UNARY)), _number, _number),
    st.builds(Step, st.just("binary"), st.sampled_from(sorted(BINARY)), _number, _number),
    st.builds(Step, st.just("fold"), st.sampled_from(sorted(FOLDS)), _number, _number),
    st.builds(Step, st.just("matmul"), st.just("matmul"), _number, _number),
)
recipes = st.lists(_steps, min_size=1, max_size=8)
smooth = st.lists(_steps.filter(lambda step: step.name not in ("abs", "max", "MAX")), min_size=1, max_size=8)
"""Recipes without a kink, where rounding would decide what a derivative is."""


def _takes(step: Step, dims: list[tuple[int, ...]]) -> tuple[int, int]:
    """Positions of the operands; a matmul's are the nearest that fit together."""
    first, second = step.first % len(dims), step.second % len(dims)
    if step.kind == "matmul":
        fitting = [at for at, dim in enumerate(dims) if dim[-2] == dims[first][-1]]
        second = fitting[step.second % len(fitting)]
    return first, second


def build(recipe: list[Step], graph: pygraph, names: str = "") -> None:
    """Adds the recipe's nodes to a graph; the last tensor and every third are outputs."""
    made = [graph.tensor(shape, name=f"{names}{at}" if names else "") for at, shape in enumerate(SHAPES)]
    for at, step in enumerate(recipe):
        made.append(_added(graph, step, made, f"{names}{at}" if names else ""))
    for tensor in [made[-1], *made[len(SHAPES) :: 3]]:
        tensor.set_output(True)


def _added(graph: pygraph, step: Step, made: list[Tensor], name: str) -> Tensor:
    first, second = _takes(step, [tensor.dim for tensor in made])
    if step.kind == "fold":
        dim = list(made[first].dim)
        dim[step.second % 3] = 1
        return graph.reduction(made[first], mode=step.name, name=name).set_dim(dim)
    operands = [made[first]] if step.kind == "unary" else [made[first], made[second]]
    out: Tensor = getattr(graph, step.name)(*operands, name=name)
    return out


def value(recipe: list[Step], arrays: list[Any], xp: Any = np) -> list[Any]:
    """Every tensor's value, those of the arrays in front, in the order in which `build` makes them."""
    made = list(arrays)
    for step in recipe:
        first, second = _takes(step, [array.shape for array in made])
        if step.kind == "fold":
            made.append(getattr(xp, FOLDS[step.name])(made[first], axis=step.second % 3, keepdims=True))
        elif step.kind == "unary":
            made.append(getattr(xp, UNARY[step.name])(made[first]))
        else:
            function = getattr(xp, BINARY.get(step.name, "matmul"))
            made.append(function(made[first], made[second]))
    return made
