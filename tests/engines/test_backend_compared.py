"""cuDNN's plans are offered where their results were compared on a GPU and right: the tables, and what stands behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cudnn_jax import _ffi
from cudnn_jax.engines import backend, backend_compared
from cudnn_jax.engines.sdpa import facts
from cudnn_jax.engines.target import CPU
from cudnn_jax.graph import OPERATIONS, GraphNotSupportedError
from support import operations

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ELSEWHERE = {"POINTWISE", "SDPA", "SDPA_BACKWARD"}
"""Compared in tests/gpu/test_pointwise.py and test_sdpa.py, and in the benchmarks; attention there has no options."""
OPT_IN = "CUDNN_JAX_CUDNN_UNPROVEN"
SEVERAL = "several products"
NOT_COMPARED = backend_compared.NOT_COMPARED | {SEVERAL}
UNSURE = NOT_COMPARED | set(backend_compared.WRONG)
SAMPLES = list(operations.ALL)
ATTENTION = {"SDPA": OPERATIONS["sdpa"], "SDPA_BACKWARD": OPERATIONS["sdpa_backward"]}
NO_NODE_HAS = {"is_inference", "score_mod", "score_mod_bprop"}
"""Keywords that the builder refuses or spells otherwise."""


class Lowered:
    """Every graph lowers, and has no plan."""

    def __init__(self, *_: Any) -> None:
        pass

    def plan_count(self) -> int:
        return 0

    def create_execution_plans(self, mode: str) -> int:
        return 0


def names_in(operation: str) -> set[str]:
    nodes = operations.graph_of(operation).nodes
    several = {SEVERAL} if sum(node.type == "MATMUL" for node in nodes) > 1 else set()
    return several | {name for node in nodes for name in backend_compared.names_of(node)}


def found(verdict: str) -> set[str]:
    """Operations that the newest comparison lists under a verdict."""
    newest = max(RESULTS.glob("*/operations-*.json"), key=lambda path: path.stem)
    return {row.get("operation", row.get("name")) for row in json.loads(newest.read_text())[verdict]}


def test_what_is_offered_ran_on_a_gpu_and_was_right() -> None:
    ran = set().union(*map(names_in, found("rows")))
    offered = {name for operation in SAMPLES if not names_in(operation) & UNSURE for name in names_in(operation)}
    assert offered - ELSEWHERE <= ran
    assert set(_ffi.lowered_node_types()) <= offered | UNSURE | ELSEWHERE
    assert not ran & UNSURE


def test_what_was_wrong_is_in_the_table() -> None:
    for operation in found("wrong"):
        assert names_in(operation) & set(backend_compared.WRONG), operation


@pytest.mark.parametrize("node", ATTENTION)
def test_every_option_of_attention_was_compared_or_is_in_a_table(node: str) -> None:
    options = {port.name for port in ATTENTION[node].inputs if port.optional} - facts.PLAIN_PORTS
    options |= {attribute.name for attribute in ATTENTION[node].attributes} - facts.PLAIN_PARAMS - NO_NODE_HAS
    options |= {output.name for output in ATTENTION[node].outputs if output.from_caller} - facts.PLAIN_RESULTS
    told, shown, ran = (
        {name.removeprefix(f"{node} ") for name in names if name.startswith(f"{node} ")}
        for names in (
            UNSURE,
            set().union(*map(names_in, operations.ATTENTION)),
            set().union(*map(names_in, found("rows"))),
        )
    )
    assert options <= told | ran
    # No sample has a dropout by random numbers: there is nothing to compare these with.
    assert shown | {"dropout"} == told | ran


@pytest.mark.parametrize("operation", [name for name in SAMPLES if not names_in(name) & UNSURE])
def test_what_was_compared_is_offered(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ffi, "BackendGraph", Lowered)
    session, _, declines = backend.propose(operations.graph_of(operation), CPU, ("A",), {})
    assert session is not None and not declines


@pytest.mark.parametrize("operation", [name for name in SAMPLES if names_in(name) & NOT_COMPARED])
def test_what_was_not_compared_is_opt_in(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ffi, "BackendGraph", Lowered)
    session, _, (decline,) = backend.propose(operations.graph_of(operation), CPU, ("A",), {})
    assert session is None and decline.engine == "cudnn"
    assert decline.reason.endswith(f"were not compared on a GPU yet; {OPT_IN}=1 offers them")
    monkeypatch.setenv(OPT_IN, "1")
    assert backend.propose(operations.graph_of(operation), CPU, ("A",), {})[0] is not None


@pytest.mark.parametrize("operation", [name for name in SAMPLES if names_in(name) & set(backend_compared.WRONG)])
def test_what_was_wrong_is_never_offered(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ffi, "BackendGraph", Lowered)
    monkeypatch.setenv(OPT_IN, "1")
    graph = operations.graph_of(operation)
    session, plans, (decline,) = backend.propose(graph, CPU, ("A",), {})
    assert session is None and not plans and "cuDNN 9.19.0" in decline.reason
    with pytest.raises(GraphNotSupportedError, match="on an H200"):
        backend.lower(graph, CPU)
