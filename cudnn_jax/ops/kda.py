"""Kimi Delta Attention: `cudnn_jax.kda` and its one-token form `cudnn_jax.kda_step`."""

from __future__ import annotations

from typing import Any

from cudnn_jax.ops._linear_attention import LinearAttention

KDA = LinearAttention("kda", gates={"g": ("HO", "K"), "beta": ("HO",)}, dt_bias=("HO", "K"), bounded=True)


def kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    cu_seqlens: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    gate_lower_bound: float | None = None,
    a_log: Any = None,
    dt_bias: Any = None,
    gate_domain: str = "log",
    checkpoint_every_n_tokens: int = 0,
    implementation: str | None = None,
) -> tuple[Any, ...]:
    """Kimi Delta Attention: a state S (V, K) of each head, in float32, is decayed channel by channel of its keys,
    corrected and read by each token in turn,

        S <- S diag(exp(g));    S <- S + beta (v - S k) k^T;    o = scale S q.

    B is the batch and T its length; total the rows of n packed sequences; H, HK and HV the heads of q, k and v, K and V
    their widths. HO = max(H, HV) heads have gates, outputs and states, and head h of them reads head h // (HO / heads)
    of q, k and v.

    Args:
      q: (B, T, H, K), or with `cu_seqlens` (total, H, K); bfloat16, float16 or float32.
      k: (B, T, HK, K) or (total, HK, K), q's dtype.
      v: (B, T, HV, V) or (total, HV, V), q's dtype.
      g: (B, T, HO, K) or (total, HO, K), float32 or q's dtype: the logarithm of each channel's decay, at most 0.
        However strong a decay is, what it leaves is right, also in front of mild ones.
      beta: (B, T, HO) or (total, HO), float32 or q's dtype: how much of the correction is written, in [0, 1] or [0, 2].
      cu_seqlens: int32 or int64 (n + 1,), where each packed sequence starts and the last one ends, from 0 and rising;
        sequences may be empty. Rows past the last end give 0 and take no gradient.
      scale: multiplies o; K**-0.5 by default.
      initial_state: (B, HO, V, K), or (n, HO, V, K) of packed sequences, float32 or bfloat16; 0 by default.
      output_final_state: whether the states behind the last tokens are returned.
      use_qk_l2norm: divides rows of q and k by sqrt(sum x^2 + 1e-6).
      use_beta_sigmoid: beta holds logits, of which the sigmoid is taken.
      allow_neg_eigval: that sigmoid is doubled. Without `use_beta_sigmoid` it changes nothing.
      safe_gate: g holds raw logits, and the decay's logarithm is
        gate_lower_bound * sigmoid(exp(a_log) * (g + dt_bias)).
      gate_lower_bound: of a safe gate, below 0; -5 by default.
      a_log: (HO,), float32 or q's dtype, with `safe_gate`; 0 by default.
      dt_bias: (HO, K), as a_log.
      gate_domain: "log", or "linear": g holds the decay itself, in (0, 1], floored at 1e-10.
      checkpoint_every_n_tokens: n > 0 also returns the states behind every n tokens of each sequence, short of its end.
      implementation: None for the ranked plan list; "xla", or the name of an engine or plan.

    Returns:
      (o, final_state), or (o, final_state, states). o is (B, T, HO, V) or (total, HO, V) in q's dtype. final_state has
      initial_state's shape and dtype, float32 without one; None unless asked for. states is (rows, HO, V, K) in q's
      dtype, in the order of the sequences, and is not differentiated. It has B ((T - 1) // n) rows; packed as many as
      there are, or where `cu_seqlens` is traced total // n, of which those behind the last are 0.

      Gradients of q, k, v, g, beta, initial_state, a_log and dt_bias are those of o and of final_state.

    Raises:
      TypeError, ValueError: an argument breaks its rule; the message names it.
      NotImplementedError: a derivative that is not reverse mode.
      GraphNotSupportedError: `implementation` names no engine, or one that declines; the message holds the names, or
        the reason.
    """
    return KDA.call(
        {"q": q, "k": k, "v": v, "g": g, "beta": beta},
        cu_seqlens=cu_seqlens,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm=use_qk_l2norm,
        use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        gate_lower_bound=gate_lower_bound,
        a_log=a_log,
        dt_bias=dt_bias,
        gate_domain=gate_domain,
        checkpoint_every_n_tokens=checkpoint_every_n_tokens,
        implementation=implementation,
    )


kimi_delta_attention = kda


def kda_step(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    *,
    state_indices: Any = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    gate_lower_bound: float | None = None,
    a_log: Any = None,
    dt_bias: Any = None,
    gate_domain: str = "log",
    implementation: str | None = None,
) -> tuple[Any, Any]:
    """`kda` over one token of each of B sequences, as in decoding.

    On a GPU the returned state is the given one's buffer where the caller donates that (`jax.jit(...,
    donate_argnames="state")`), and a copy otherwise.

    Args:
      q, k, v: (B, H, K), (B, HK, K), (B, HV, V).
      g, beta: (B, HO, K), (B, HO).
      state: (B, HO, V, K), float32 or bfloat16; or with `state_indices` a pool (P, HO, V, K), P at least 1.
      state_indices: int32 (B,), each sequence's row of the pool, all different. A sequence whose index is outside
        [0, P) starts from 0 and its state is written nowhere.
      scale, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, safe_gate, gate_lower_bound, a_log, dt_bias,
        gate_domain, implementation: as those of `kda`.

    Returns:
      (o, state): (B, HO, V) in q's dtype, and the states behind the token in `state`'s shape and dtype; other rows of a
      pool are as they were.

    Raises:
      TypeError, ValueError: an argument breaks its rule; the message names it.
      NotImplementedError: a derivative through a pool, or one that is not reverse mode.
      GraphNotSupportedError: `implementation` names no engine, or one that declines; the message holds the names, or
        the reason.
    """
    return KDA.step(
        {"q": q, "k": k, "v": v, "g": g, "beta": beta},
        state=state,
        state_indices=state_indices,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        gate_lower_bound=gate_lower_bound,
        a_log=a_log,
        dt_bias=dt_bias,
        gate_domain=gate_domain,
        implementation=implementation,
    )
