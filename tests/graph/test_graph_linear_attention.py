"""Linear attention nodes: what is inferred, which outputs exist, what is refused, and what the facts say."""

from __future__ import annotations

from typing import Any

import pytest

from cudnn_jax.engines.linear_attention.facts import analyze
from cudnn_jax.engines.manifest import family_for
from cudnn_jax.graph import GraphValidationError, Tensor, data_type, pygraph

T, N, P, H, HK, HV, K, V = 20, 3, 7, 2, 1, 4, 8, 6
SHAPES = {
    "q": (T, H, K),
    "k": (T, HK, K),
    "v": (T, HV, V),
    "g": (T, HV),
    "beta": (T, HV),
    "cu_seqlens": (N + 1,),
    "dO": (T, HV, V),
    "initial_state": (N, HV, V, K),
    "d_final_state": (N, HV, V, K),
    "state_checkpoints": (T // 6, HV, V, K),
    "a_log": (HV,),
    "dt_bias": (HV,),
    "state_indices": (N,),
}
TYPES = {"g": "float32", "cu_seqlens": "int32", "state_indices": "int32", "initial_state": "float32"}
TYPES |= {"d_final_state": "float32", "a_log": "float32"}
TOKENS = ("q", "k", "v", "g", "beta", "cu_seqlens")
CHANNELS = {"g": (T, HV, K), "dt_bias": (HV, K)}
OPERATIONS: dict[str, tuple[tuple[str, ...], dict[str, tuple[int, ...]]]] = {
    "gdn": ((), {}),
    "kda": ((), CHANNELS),
    "gdn2": (("w",), {**CHANNELS, "beta": (T, HV, K), "w": (T, HV, V)}),
}
"""Operation -> what it has beyond TOKENS, and dims that are not those of SHAPES."""


@pytest.fixture
def graph() -> pygraph:
    return pygraph(io_data_type="bfloat16")


def ports(graph: pygraph, *more: str, **dims: tuple[int, ...]) -> dict[str, Tensor]:
    names = (*TOKENS, *more)
    return {
        name: graph.tensor(
            dims[name] if name in dims else SHAPES[name], data_type=TYPES.get(name, "bfloat16"), name=name
        )
        for name in names
    }


def test_forward_outputs(graph: pygraph) -> None:
    out, final, kept = graph.gdn(**ports(graph))
    assert (out.dim, final, kept) == ((T, HV, V), None, None)
    out, final, kept = graph.gdn(**ports(graph), output_final_state=True, checkpoint_every_n_tokens=6)
    assert (final.dim, kept.dim) == ((N, HV, V, K), (3, HV, V, K))
    assert [x.data_type.value for x in (out, final, kept)] == ["bfloat16", "float32", "bfloat16"]
    given = ports(graph, "initial_state")
    given["initial_state"].set_data_type("bfloat16")
    _, final, _ = graph.gdn(**given, output_final_state=True)
    assert final.data_type is data_type.BFLOAT16
    given["initial_state"].set_data_type("float32")
    assert final.data_type is data_type.FLOAT


def test_a_pool_is_an_output_where_it_is_written(graph: pygraph) -> None:
    given = ports(graph, "initial_state", "state_indices", initial_state=(P, HV, V, K))
    _, final, _ = graph.gdn(**given, output_final_state=True)
    assert final.dim == (N, HV, V, K)
    _, final, _ = graph.gdn(**given, output_final_state=True, overwrite_initial_state=True)
    assert final.dim == (P, HV, V, K)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients_are_as_their_inputs(graph: pygraph, operation: str) -> None:
    more, dims = OPERATIONS[operation]
    build = getattr(graph, f"{operation}_bwd")
    assert build(**ports(graph, "dO", *more, **dims))[5 + len(more) :] == (None, None, None)
    names = ("dO", "initial_state", "d_final_state", "a_log", "dt_bias", "state_checkpoints", *more)
    given = ports(graph, *names, **dims)
    made = build(**given, safe_gate=True, checkpoint_every_n_tokens=6)
    for tensor, name in zip(made, (*TOKENS[:5], *more, "initial_state", "a_log", "dt_bias"), strict=True):
        tensor.set_output(True)
        assert (tensor.dim, tensor.data_type) == (given[name].dim, given[name].data_type)
    graph.freeze()


@pytest.mark.parametrize("operation", ["kda", "gdn2"])
def test_gates_with_channels(graph: pygraph, operation: str) -> None:
    more, dims = OPERATIONS[operation]
    build = getattr(graph, operation)
    out, final, _ = build(**ports(graph, *more, **dims), output_final_state=True)
    assert (out.dim, final.dim) == ((T, HV, V), (N, HV, V, K))
    for name in dims:
        given = ports(graph, *more, "dt_bias", **(dims | {name: dims[name][:-1]}))
        with pytest.raises(GraphValidationError, match=f"{name} has dim"):
            build(**given, safe_gate=True)
    with pytest.raises(GraphValidationError, match="gate_lower_bound is 0.0; the rule: below 0"):
        build(**ports(graph, *more, **dims), gate_lower_bound=0)


BAD: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    ((), {"k": (T, HK, K + 1)}, {}, r"k has dim .* the rule: \(T, HK, K\) with"),
    ((), {"v": (T + 1, HV, V)}, {}, "v has dim"),
    ((), {"v": (T, 3, V)}, {}, "g has 4 heads, where q, k, v have 2, 1, 3"),
    ((), {"g": (T, 2), "beta": (T, 2)}, {}, "g has 2 heads.* the larger of q's and v's heads"),
    ((), {"k": (T, 3, K)}, {}, "g has 4 heads, where q, k, v have 2, 3, 4"),
    ((), {"beta": (T, 2)}, {}, "beta has dim"),
    ((), {"q": (T, 0, K)}, {}, "q has H = 0"),
    ((), {"cu_seqlens": (0,)}, {}, r"cu_seqlens has dim \(0,\)"),
    (("initial_state",), {"initial_state": (N + 1, HV, V, K)}, {}, r"initial_state has dim .* with N = 3"),
    (("initial_state",), {"initial_state": (N, HV, K, V)}, {}, "initial_state has dim"),
    (("initial_state", "state_indices"), {"state_indices": (P,)}, {}, "state_indices has dim"),
    (("state_indices",), {}, {}, "state_indices came without initial_state"),
    ((), {}, {"overwrite_initial_state": True}, "overwrite_initial_state came without initial_state"),
    (("initial_state",), {}, {"overwrite_initial_state": True}, "came without output_final_state"),
    ((), {}, {"safe_gate": True, "gate_domain": "LINEAR"}, "safe_gate came with gate_domain LINEAR"),
    (("a_log",), {}, {}, "a_log came without safe_gate"),
    (("dt_bias",), {"dt_bias": (2,)}, {"safe_gate": True}, "dt_bias has dim"),
    ((), {}, {"checkpoint_every_n_tokens": -1}, "checkpoint_every_n_tokens is -1"),
    ((), {}, {"checkpoint_every_n_tokens": 2**31}, "checkpoint_every_n_tokens is 2147483648; .* at most 2147483647"),
    (
        ("initial_state", "state_indices"),
        {"initial_state": (0, HV, V, K)},
        {},
        r"initial_state has dim \(0, .* has a row",
    ),
    ((), {}, {"gate_domain": "exp"}, "gate_domain is 'exp'; the rule: one of 'LOG', 'LINEAR'"),
]


@pytest.mark.parametrize(("more", "dims", "options", "words"), BAD, ids=[row[3][:30] for row in BAD])
def test_what_is_refused(graph: pygraph, more: Any, dims: Any, options: Any, words: str) -> None:
    with pytest.raises(GraphValidationError, match=words):
        graph.gdn(**ports(graph, *more, **dims), **options)


def test_kept_states_have_a_row_for_each_interval(graph: pygraph) -> None:
    for every, words in ((5, r"state_checkpoints has dim .* = \(4, 4, 6, 8\)"), (0, "is at least 1")):
        with pytest.raises(GraphValidationError, match=words):
            graph.gdn_bwd(**ports(graph, "dO", "state_checkpoints"), checkpoint_every_n_tokens=every)


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("q", "float64", "q has data type float64; the rule: float32 or float16 or bfloat16"),
        ("k", "float16", "k has data type float16; the rule: bfloat16"),
        ("beta", "float16", "beta has data type float16; the rule: float32 or bfloat16"),
        ("cu_seqlens", "float32", "cu_seqlens has data type float32; the rule: int32 or int64"),
        ("initial_state", "float16", "initial_state has data type float16; the rule: float32 or bfloat16"),
        ("O", "float32", "O was set to data type float32; the rule: bfloat16"),
    ],
)
def test_types_that_are_refused(graph: pygraph, name: str, dtype: str, words: str) -> None:
    given = ports(graph, "initial_state")
    out, _, _ = graph.gdn(**given)
    out.set_output(True)
    (given | {"O": out})[name].set_data_type(dtype)
    with pytest.raises(GraphValidationError, match=words):
        graph.freeze()


def test_facts(graph: pygraph) -> None:
    given = ports(graph, "initial_state", "state_indices", initial_state=(P, HV, V, K))
    made = graph.gdn(**given, output_final_state=True, overwrite_initial_state=True, use_qk_l2norm=True)
    for tensor in made[:2]:
        tensor.set_output(True)
    graph.freeze()
    facts = analyze(graph)
    assert (facts.operation, facts.direction, facts.total, facts.sequences) == ("gdn", "fwd", T, N)
    assert (facts.heads_q, facts.heads_k, facts.heads_v, facts.heads) == (H, HK, HV, HV)
    assert (facts.key_dim, facts.value_dim, facts.scale, facts.gate_domain) == (K, V, K**-0.5, "log")
    assert (facts.pool, facts.overwrite, facts.checkpoint_every) == (True, True, 0)
    assert (facts.scattered, facts.unexplained) == ((), ())
    assert [graph.inputs[at] for at in facts.ports.values()] == list(given.values())
    assert facts.results == {"O": 0, "final_state": 1}
    assert facts.describe() == (
        "gdn fwd bfloat16 N3 T20 heads 2/1/4 K8 V6 use_qk_l2norm overwrite initial_state state_indices final_state"
    )


@pytest.mark.parametrize(
    ("operation", "options", "words"),
    [
        ("kda", {"safe_gate": True}, " safe_gate gate above -5"),
        ("kda", {"safe_gate": True, "gate_lower_bound": -2.5}, " safe_gate gate above -2.5"),
        ("gdn2", {}, ""),
    ],
)
def test_facts_of_gates_with_channels(graph: pygraph, operation: str, options: Any, words: str) -> None:
    more, dims = OPERATIONS[operation]
    out, _, _ = getattr(graph, operation)(**ports(graph, *more, **dims), **options)
    out.set_output(True)
    graph.freeze()
    family = family_for(graph)
    assert family is not None and family.name == operation
    assert analyze(graph).describe() == f"{operation} fwd bfloat16 N3 T20 heads 2/1/4 K8 V6{words}"


def test_a_guarded_beta_is_not_described(graph: pygraph) -> None:
    more, dims = OPERATIONS["gdn2"]
    graph.gdn2(**ports(graph, *more, **dims), beta_guard=True)[0].set_output(True)
    graph.freeze()
    assert analyze(graph).unexplained == ("beta_guard",)


def test_facts_name_what_they_do_not_describe(graph: pygraph) -> None:
    given = ports(graph)
    given["q"] = graph.relu(graph.tensor(SHAPES["q"]), name="before").set_data_type("bfloat16")
    given["v"].set_stride((V, T * V, 1))
    out, _, _ = graph.gdn(**given)
    out.set_output(True)
    graph.freeze()
    facts = analyze(graph)
    assert facts.scattered == ("v",)
    assert facts.unexplained == ("before", "port q that is no input")
