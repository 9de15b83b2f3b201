"""Functions of linear attention graphs against the float64 oracle, and choices of options in which every two meet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from support import linear_attention as oracle
from support.linear_attention import Arrays, Options
from support.linear_graphs import GRADIENTS, graph, run

FORWARD, BACKWARD = 5e-6, 3e-5


def compiled(make: Any) -> Any:
    """`make` with one compilation for all graphs of the same facts."""
    known: dict[Any, Any] = {}

    def of(facts: Any) -> Any:
        if facts not in known:
            known[facts] = jax.jit(make(facts))
        return known[facts]

    return of


def check_forward(
    make: Any,
    given: Arrays,
    options: Options,
    tolerance: float = FORWARD,
    jit: bool = False,
    operation: str = "gdn",
) -> None:
    want = oracle.forward(given, options)
    made, outputs = graph("fwd", given, options, operation, output_final_state=True)
    got = run(make, made, outputs, given, jit)
    end = given["cu_seqlens"][-1]
    assert not got["O"][end:].any()
    for name in outputs:
        kept = len(want[name])
        assert not got[name][kept:].any()
        assert oracle.error(got[name][:kept], want[name], usual=0.3) <= tolerance, name


def check_backward(
    make: Any,
    given: Arrays,
    options: Options,
    rng: np.random.Generator,
    final: bool = True,
    tolerance: float = BACKWARD,
    jit: bool = False,
    operation: str = "gdn",
) -> None:
    total, heads = given["beta"].shape[:2]
    width = given["v"].shape[2]
    d_o = rng.standard_normal((total, heads, width)).astype(given["q"].dtype)
    shape = (len(given["cu_seqlens"]) - 1, heads, width, given["q"].shape[2])
    d_final = rng.standard_normal(shape).astype(np.float32) if final else None
    want = oracle.backward(given, d_o, d_final, options)
    wired = given | {"dO": d_o} | ({"d_final_state": d_final} if final else {})
    made, outputs = graph("bwd", wired, replace(options, checkpoint_every_n_tokens=0), operation)
    got = run(make, made, outputs, wired, jit)
    assert set(outputs) == {gradient for gradient, name in GRADIENTS.items() if name in given}
    for gradient in outputs:
        assert oracle.error(got[gradient], want[GRADIENTS[gradient]], usual=0.3) <= tolerance, gradient


def pairs(choices: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Rows in which any two choices of different options meet, found greedily."""
    rows = list(itertools.product(*choices.values()))
    columns = list(itertools.combinations(range(len(choices)), 2))
    missing = {(a, b, row[a], row[b]) for row in rows for a, b in columns}
    met = {row: {(a, b, row[a], row[b]) for a, b in columns} for row in rows}
    found = []
    while missing:
        found.append(max(rows, key=lambda row: len(met[row] & missing)))
        missing -= met[found[-1]]
    return found
