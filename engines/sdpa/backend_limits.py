"""Where cuDNN would take an attention graph and answer otherwise than the operation is defined.

What is said of cuDNN here was seen on an H200 with cuDNN 9.19; tests/gpu holds the cases.
"""

from __future__ import annotations

from cudnn_jax.engines.sdpa.facts import SdpaFacts
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import data_type

MINUS_INFINITY = 0xFF800000
"""float32 -inf as a word."""


def mismatch(facts: SdpaFacts, target: Target) -> str | None:
    """The reason not to ask cuDNN, or None."""
    if facts.dtype not in (data_type.BFLOAT16, data_type.HALF):
        return f"dtype {facts.dtype.value}, serves bfloat16 and float16"
    if 0 in (facts.batch, facts.q_len, facts.kv_len):
        return f"length 0 in B{facts.batch} T{facts.q_len} S{facts.kv_len}, serves lengths of at least 1"
    if "dStats" in facts.ports:
        return "a cotangent of the residual, serves none"
    if "dBias" in facts.results and facts.bias_dim is not None:
        full = (facts.q_len, facts.kv_len)
        if facts.bias_dim[2:] != full:
            return f"gradient of a bias {facts.bias_dim}, serves query and key axes of {full}"
    if facts.direction == "bwd" and facts.bias_dim is not None:
        # With one row of bias for all queries, cuDNN's dQ, dK and dV were off by as much as they are large.
        if facts.bias_dim[2] == 1 < min(facts.q_len, facts.bias_dim[3]):
            return f"backward of a bias {facts.bias_dim}, serves a query axis of {facts.q_len}"
    if facts.ragged and "dSink_token" in facts.results:
        # cuDNN 9.19.0's was off by 0.67 of its size; that of sequences that are not packed was right.
        return "dSink_token of packed sequences, serves others with cuDNN 9.19.0"
    if facts.padding and "score_sum_exp" in facts.results:
        return "score_sum_exp under lengths, whose rows without keys are not 0 with cuDNN 9.19.0"
    return None


def prefill(facts: SdpaFacts) -> dict[int, int]:
    """A batch without keys is left unwritten, except dQ: its outputs and gradients are 0, its logsumexp -inf.

    So is what lies between and behind packed sequences.
    """
    if not facts.padding:
        return {}
    words = {"O": 0, "Stats": MINUS_INFINITY, "dK": 0, "dV": 0}
    words |= {"dQ": 0} if facts.ragged else {}
    return {facts.results[name]: word for name, word in words.items() if name in facts.results}
