"""What `cudnn_jax.sdpa` refuses, and that each error names the argument, what came, and the rule."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax

B, T, S, N, NK, D = 2, 6, 5, 4, 2, 8


def operands(**changes: Any) -> dict[str, Any]:
    shapes = {"query": (B, T, N, D), "key": (B, S, NK, D), "value": (B, S, NK, D)}
    made: dict[str, Any] = {name: jnp.ones(shape, jnp.float32) for name, shape in shapes.items()}
    return made | changes


def ones(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (
        "rank",
        {"query": ones(B, N, D, 1, 1)},
        ValueError,
        r"query has shape \(2, 4, 8, 1, 1\); the rule: \(B, T, N, D\)",
    ),
    ("mixed rank", {"key": ones(S, NK, D)}, ValueError, r"key has shape \(5, 2, 8\); the rule: query's rank 4"),
    ("no array", {"value": [[1.0]]}, TypeError, "value is a list; the rule: an array"),
    ("dtype", {"query": ones(B, T, N, D, dtype=jnp.int32)}, TypeError, "query has dtype int32; the rule: bfloat16 or"),
    ("mixed dtypes", {"key": ones(B, S, NK, D, dtype=jnp.bfloat16)}, TypeError, "key has dtype bfloat16; .* float32"),
    ("batch", {"key": ones(3, S, NK, D)}, ValueError, r"key has shape \(3, 5, 2, 8\), expected \(2, any, any, 8\)"),
    ("head dim", {"key": ones(B, S, NK, 9)}, ValueError, r"key has shape \(2, 5, 2, 9\)"),
    ("length", {"value": ones(B, 7, NK, D)}, ValueError, r"value has shape \(2, 7, 2, 8\), expected \(2, 5, 2, any\)"),
    ("kv heads", {"value": ones(B, S, 4, D)}, ValueError, r"value has shape \(2, 5, 4, 8\)"),
    ("head ratio", {"query": ones(B, T, 3, D)}, ValueError, "query has 3 heads and key 2; the rule: .* multiple"),
    ("no heads", {"query": ones(B, T, 0, D)}, ValueError, "at least one head"),
    ("bias rank", {"bias": ones(T, S)}, ValueError, r"bias has shape \(6, 5\); the rule: 4-D"),
    (
        "bias shape",
        {"bias": ones(1, NK, T, S)},
        ValueError,
        r"bias has shape \(1, 2, 6, 5\).* broadcast to \(2, 4, 6, 5\)",
    ),
    ("bias dtype", {"bias": ones(1, 1, T, S, dtype=jnp.int32)}, TypeError, "bias has dtype int32"),
    ("mask shape", {"mask": ones(B, 1, T, T, dtype=bool)}, ValueError, r"mask has shape \(2, 1, 6, 6\)"),
    ("mask dtype", {"mask": ones(1, 1, T, S)}, TypeError, "mask has dtype float32; the rule: boolean"),
    (
        "lengths shape",
        {"key_value_seq_lengths": ones(3, dtype=jnp.int32)},
        ValueError,
        r"key_value_seq_lengths .*\(3,\)",
    ),
    ("lengths dtype", {"query_seq_lengths": ones(B)}, TypeError, "query_seq_lengths has dtype float32"),
    ("lengths rank", {"query_seq_lengths": ones(B, 1, dtype=jnp.int32)}, ValueError, r"query_seq_lengths has shape"),
    ("window", {"local_window_size": (1, 2, 3)}, ValueError, r"local_window_size is \(1, 2, 3\); the rule"),
    ("window value", {"local_window_size": -2}, ValueError, "local_window_size is -2"),
    ("window type", {"local_window_size": 1.5}, ValueError, "local_window_size is 1.5"),
    ("alignment", {"causal_alignment": "bottom"}, ValueError, "causal_alignment is 'bottom'; the rule: 'top_left'"),
    ("scale", {"scale": "big"}, TypeError, "scale is 'big'; the rule: a Python number"),
    ("scale nan", {"scale": float("nan")}, ValueError, "scale is nan; the rule: a finite number"),
    (
        "scale wide",
        {"scale": 1e39},
        ValueError,
        r"scale is 1e\+39; the rule: a finite number, from -3.40282.*e\+38 to 3.4",
    ),
    (
        "scale digits",
        {"scale": -(10**5000)},
        ValueError,
        "^scale is an integer of 16610 bits; the rule: a finite number",
    ),
    ("scale numbers", {"scale": np.ones(2)}, TypeError, "scale is an array; the rule: a Python number"),
    ("window digits", {"local_window_size": -(10**5000)}, ValueError, "local_window_size is an integer of 16610 bits"),
    ("implementation", {"implementation": 3}, TypeError, "implementation is 3; the rule: None or a string"),
    ("scale array", {"scale": ones()}, TypeError, "scale is an array"),
]


@pytest.mark.parametrize(("changes", "error", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_wrong_argument_is_named_while_tracing(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = operands(**changes)
    arrays = {name: value for name, value in arguments.items() if isinstance(value, jax.Array) and name != "scale"}
    static = {name: value for name, value in arguments.items() if name not in arrays}
    with pytest.raises(error, match=words):
        jax.eval_shape(lambda arrays: cudnn_jax.sdpa(**arrays, **static), arrays)


UNSERVED = {
    "cu_seqlens_q": np.array([0, T]),
    "cu_seqlens_kv": np.array([0, S]),
    "page_table_k": np.zeros((B, 1), np.int32),
    "page_table_v": np.zeros((B, 1), np.int32),
    "sinks": np.zeros(N, np.float32),
    "logits_soft_cap": 30.0,
    "dropout_rate": 0.1,
    "dropout_key": 0,
}


@pytest.mark.parametrize("option", UNSERVED)
def test_an_option_that_is_not_served_is_named(option: str) -> None:
    with pytest.raises(NotImplementedError, match=f"the option {option} is not served"):
        cudnn_jax.sdpa(**operands(), **{option: UNSERVED[option]})


def test_a_symbolic_dimension_is_named() -> None:
    (batch,) = jax.export.symbolic_shape("b")
    avals = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in operands().values()]
    with pytest.raises(TypeError, match=r"query has shape \(b, 6, 4, 8\); the rule: dimensions known while tracing"):
        jax.export.export(jax.jit(cudnn_jax.sdpa))(*avals)


def test_the_signature() -> None:
    expected = (
        "(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, causal_alignment='top_left', "
        "local_window_size=None, query_seq_lengths=None, key_value_seq_lengths=None, cu_seqlens_q=None, "
        "cu_seqlens_kv=None, page_table_k=None, page_table_v=None, sinks=None, logits_soft_cap=None, "
        "dropout_rate=0.0, dropout_key=None, deterministic=False, return_residual=False, implementation=None)"
    )
    signature = inspect.signature(cudnn_jax.sdpa)
    bare = signature.replace(
        parameters=[p.replace(annotation=p.empty) for p in signature.parameters.values()],
        return_annotation=signature.empty,
    )
    assert str(bare) == expected


def test_an_engine_asked_for_by_name_that_declines_says_why() -> None:
    with pytest.raises(
        cudnn_jax.GraphNotSupportedError, match="implementation='cudnn' cannot serve(.|\n)*platform cpu"
    ):
        cudnn_jax.sdpa(**operands(), implementation="cudnn")
    with pytest.raises(cudnn_jax.GraphNotSupportedError, match="implementation='flash'"):
        cudnn_jax.sdpa(**operands(), implementation="flash")


def test_an_implementation_that_nothing_has_is_named_while_tracing_with_those_that_there_are() -> None:
    for wanted in ("nonsense", "cutile_gdn", "CUDNN", ""):
        with pytest.raises(cudnn_jax.GraphNotSupportedError) as caught:
            jax.eval_shape(lambda x, wanted=wanted: cudnn_jax.sdpa(**x, implementation=wanted), operands())
        rule = "the rule: None, one of cudnn, xla, or a plan by its name"
        assert str(caught.value) == f"implementation={wanted!r} cannot serve sdpa; {rule}"
    with pytest.raises(cudnn_jax.GraphNotSupportedError, match="it is no plan of xla, which has xla"):
        cudnn_jax.sdpa(**operands(), implementation="xla:tile=8")


def test_forward_mode_and_second_derivatives_are_refused_by_name() -> None:
    arrays = operands()

    def loss(query: jax.Array) -> jax.Array:
        return cudnn_jax.sdpa(query, arrays["key"], arrays["value"]).sum()

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (arrays["query"],), (arrays["query"],))
    with pytest.raises(NotImplementedError, match="use reverse mode"):
        jax.grad(lambda query: jax.grad(loss)(query).sum())(arrays["query"])
