"""The attention cases that every engine answers, their inputs, their float64 answers, and the check.

A case is data: sizes and options. `arrays` draws its inputs in a user's axis order (see oracle.py), `expected` gives
the float64 answer, `check` compares an engine's answer. `engine_function` joins an engine's forward and backward
functions; a test of the public operation calls it with `case.options()` and checks the same way.
"""

from __future__ import annotations

import math
import os
import secrets
from dataclasses import dataclass
from types import MappingProxyType

import ml_dtypes
import numpy as np

from support.attention.oracle import Answer, attention, distance

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FORWARD_TOLERANCE = {"float32": 5e-6, "float16": 1.25e-3, "bfloat16": 5e-3}
GRADIENT_TOLERANCE = {"float32": 3e-5, "float16": 3.75e-3, "bfloat16": 1.5e-2}

QUICK = {"xla_backend_optimization_level": 0}
"""Compiler options for small cases on a CPU: most of their time is XLA's optimiser."""


@dataclass(frozen=True)
class Case:
    """One attention problem.

    Attributes:
      bias, mask: letters for the axes, "1NTS", "B11S", ...; "" for none.
      bias_shift: added to every bias entry, so that the logsumexp can lie far below zero.
      window: (left, right), None on an unbounded side.
      poison: `garbage` wherever a length says padding, in inputs and cotangents.
      d_lse: the logsumexp has a cotangent too.
      full_mask: the mask keeps everything. Otherwise it drops a third at random and all of the first row or batch.
    """

    name: str
    b: int = 2
    t: int = 97
    s: int = 97
    n: int = 2
    nk: int = 2
    d: int = 32
    dv: int = 0
    dtype: str = "float32"
    causal: bool = False
    alignment: str = "top_left"
    window: tuple[int | None, int | None] | None = None
    bias: str = ""
    bias_dtype: str = ""
    bias_shift: float = 0.0
    mask: str = ""
    full_mask: bool = False
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    scale: float | None = None
    poison: bool = False
    garbage: float = np.nan
    d_lse: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def value_dim(self) -> int:
        return self.dv or self.d

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """(left, right), the causal diagonal included."""
        left, right = self.window or (None, None)
        return left, (0 if self.causal else right)

    def shape_of(self, letters: str) -> tuple[int, ...]:
        sizes = {"1": 1, "B": self.b, "N": self.n, "T": self.t, "S": self.s}
        return tuple(sizes[letter] for letter in letters)

    def options(self) -> dict:
        """Keyword arguments of `cudnn_jax.sdpa`, arrays as NumPy; bias and mask come from `arrays`."""
        given = {
            "scale": self.scale,
            "is_causal": self.causal,
            "causal_alignment": self.alignment,
            "local_window_size": self.window,
            "query_seq_lengths": _lengths(self.q_lengths),
            "key_value_seq_lengths": _lengths(self.kv_lengths),
        }
        return {name: value for name, value in given.items() if value is not None}


def _lengths(given):
    return None if given is None else np.asarray(given, np.int32)


def arrays(case: Case, seed: int | None = None) -> dict[str, np.ndarray]:
    """Fresh inputs and cotangents: query, key, value, bias, mask, d_o, d_lse, as far as the case has them.

    The seed is new in every run and shown with a failure.
    """
    if seed is None:
        seed = int(os.environ.get("CUDNN_JAX_TEST_SEED", secrets.randbits(32)))
    print(f"{case}: CUDNN_JAX_TEST_SEED={seed}")
    rng = np.random.default_rng(seed)
    dtype = DTYPES[case.dtype]

    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    made = {
        "query": draw(case.b, case.t, case.n, case.d),
        "key": draw(case.b, case.s, case.nk, case.d),
        "value": draw(case.b, case.s, case.nk, case.value_dim),
        "d_o": draw(case.b, case.t, case.n, case.value_dim),
    }
    if case.bias:
        bias = rng.standard_normal(case.shape_of(case.bias)) + case.bias_shift
        made["bias"] = bias.astype(DTYPES[case.bias_dtype or case.dtype])
    if case.mask:
        mask = rng.random(case.shape_of(case.mask)) < (1.1 if case.full_mask else 0.67)
        if not case.full_mask:
            mask[:, :, 0] = mask[:, :, 0] & (case.mask[2] == "1")
            mask[0] = mask[0] & (case.mask[2] != "1")
        made["mask"] = mask
    if case.d_lse:
        made["d_lse"] = rng.standard_normal((case.b, case.t, case.n)).astype(np.float32)
    if case.poison:
        _poison(case, made)
    return made


def _poison(case: Case, made: dict[str, np.ndarray]) -> None:
    q_lengths = case.q_lengths or (case.t,) * case.b
    kv_lengths = case.kv_lengths or (case.s,) * case.b
    for index, (q_length, kv_length) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        for name, length in (("query", q_length), ("d_o", q_length), ("d_lse", q_length)):
            if name in made:
                made[name][index, length:] = case.garbage
        for name in ("key", "value"):
            made[name][index, kv_length:] = case.garbage
    bias = made.get("bias")
    if bias is not None:
        groups = [[i] for i in range(case.b)] if bias.shape[0] > 1 else [range(case.b)]
        for index, group in enumerate(groups):
            if bias.shape[2] > 1:
                bias[index, :, max(q_lengths[i] for i in group) :] = case.garbage
            if bias.shape[3] > 1:
                bias[index, :, :, max(kv_lengths[i] for i in group) :] = case.garbage


def expected(case: Case, given: dict[str, np.ndarray]) -> Answer:
    left, right = case.bounds
    wide = {name: x if x.dtype == bool else x.astype(np.float64) for name, x in given.items()}
    return attention(
        **wide,
        scale=case.scale,
        left=left,
        right=right,
        alignment=case.alignment,
        q_lengths=case.q_lengths,
        kv_lengths=case.kv_lengths,
    )


def check(case: Case, got: dict, want: Answer) -> None:
    """Compares o, lse, d_query, d_key, d_value, d_bias, whichever `got` holds, with the oracle's answer.

    Exact: which rows are -inf in the logsumexp, and that gradients and outputs are 0 wherever the definition makes a
    whole row 0.
    """
    forward, gradient = FORWARD_TOLERANCE[case.dtype], GRADIENT_TOLERANCE[case.dtype]
    for name, value in got.items():
        answer, truth = np.asarray(value).astype(np.float64), getattr(want, name)
        assert answer.shape == truth.shape, f"{case}: {name} has shape {answer.shape}, want {truth.shape}"
        assert not np.isnan(answer).any(), f"{case}: {name} holds NaN"
        if name == "lse":
            np.testing.assert_array_equal(np.isneginf(answer), np.isneginf(truth), err_msg=f"{case}: lse")
            answer, truth = (np.where(np.isneginf(x), 0, x) for x in (answer, truth))
        elif name in ("o", "d_query"):
            alone = np.isneginf(want.lse)
            assert not answer[alone].any(), f"{case}: {name} must be 0 where nothing is attended to"
        elif name in ("d_key", "d_value"):
            unseen = ~want.d_value.any(axis=-1)
            assert not answer[unseen].any(), f"{case}: {name} must be 0 at keys that nobody attends to"
        limit = forward if name in ("o", "lse") else gradient
        error = distance(answer, truth, _bias_gradient_scale(case) if name == "d_bias" else 1.0)
        assert error <= limit, f"{case}: {name} is off by {error:.3g}, allowed {limit:.3g}"


def _bias_gradient_scale(case: Case) -> float:
    """How large an entry of dBias is: d_o . v for each row that it sums, shared among the keys unless it sums those.

    Over all keys of a row the shares cancel (a softmax ignores a shift), which leaves the rounding of the terms: such a
    sum is held to the norm of its terms, not to 1e-2 of it.
    """
    rows = math.prod(size for axis, size in zip(case.bias, (case.b, case.n, case.t), strict=False) if axis == "1")
    terms = math.sqrt(rows * case.value_dim)
    return 100 * terms if case.bias[3] == "1" else terms / math.sqrt(max(case.s, 1))


def facts(case: Case, direction: str):
    """The engine facts of a case, ports in the order of `_PORTS`."""
    from cudnn_jax.engines.sdpa.facts import SdpaFacts
    from cudnn_jax.graph import data_type

    present = {"bias": case.bias, "mask": case.mask, "dStats": case.d_lse}
    present |= {"seq_len_q": case.q_lengths is not None, "seq_len_kv": case.kv_lengths is not None}
    names = [name for name in _PORTS[direction] if present.get(name, True)]
    results = [name for name in _RESULTS[direction] if name != "dBias" or case.bias]
    left, right = case.bounds
    bias_dtype = data_type.of(case.bias_dtype or case.dtype) if case.bias else None
    return SdpaFacts(
        direction=direction,
        batch=case.b,
        q_heads=case.n,
        kv_heads=case.nk,
        q_len=case.t,
        kv_len=case.s,
        head_dim=case.d,
        v_head_dim=case.value_dim,
        dtype=data_type.of(case.dtype),
        scale=case.d**-0.5 if case.scale is None else case.scale,
        alignment=case.alignment,
        left=left,
        right=right,
        bias_dim=case.shape_of(case.bias) if case.bias else None,
        bias_dtype=bias_dtype,
        mask_dim=case.shape_of(case.mask) if case.mask else None,
        stats=True,
        deterministic=False,
        dtypes=(data_type.of(case.dtype),),
        unexplained=(),
        ports=MappingProxyType({name: index for index, name in enumerate(names)}),
        results=MappingProxyType({name: index for index, name in enumerate(results)}),
    )


_PORTS = {
    "fwd": ("q", "k", "v", "bias", "mask", "seq_len_q", "seq_len_kv"),
    "bwd": ("q", "k", "v", "o", "dO", "stats", "bias", "mask", "seq_len_q", "seq_len_kv", "dStats"),
}
_RESULTS = {"fwd": ("O", "Stats"), "bwd": ("dQ", "dK", "dV", "dBias")}


def engine_ports(case: Case, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of a case under the graph's port names and in its logical dims."""
    turned = {"q": "query", "k": "key", "v": "value", "dO": "d_o"}
    ports = {port: np.swapaxes(given[name], 1, 2) for port, name in turned.items()}
    ports |= {name: given[name] for name in ("bias", "mask") if name in given}
    if case.d_lse:
        ports["dStats"] = np.swapaxes(given["d_lse"], 1, 2)[..., None]
    for port, lengths in (("seq_len_q", case.q_lengths), ("seq_len_kv", case.kv_lengths)):
        if lengths is not None:
            ports[port] = np.asarray(lengths, np.int32).reshape(-1, 1, 1, 1)
    return ports


def engine_function(case: Case, forward, backward):
    """ports -> {"o": ..., "lse": ..., "d_query": ...}: both directions of an engine, residuals passed on."""
    fwd_facts, bwd_facts = facts(case, "fwd"), facts(case, "bwd")
    run_forward, run_backward = forward(fwd_facts), backward(bwd_facts)

    def both(ports):
        o, stats = run_forward(*(ports[name] for name in fwd_facts.ports))
        ports = {**ports, "o": o, "stats": stats}
        gradients = run_backward(*(ports[name] for name in bwd_facts.ports))
        names = ("d_query", "d_key", "d_value", "d_bias")
        got = dict(zip(names, gradients, strict=False))
        for name in ("d_query", "d_key", "d_value"):
            got[name] = got[name].swapaxes(1, 2)
        return {"o": o.swapaxes(1, 2), "lse": stats[..., 0].swapaxes(1, 2), **got}

    return both


def _grid() -> list[Case]:
    causal_lengths = dict(causal=True, alignment="bottom_right", q_lengths=(50, 97), kv_lengths=(70, 33))
    return [
        Case("plain"),
        Case("plain_bf16", dtype="bfloat16", d_lse=True),
        Case("plain_f16", dtype="float16", d_lse=True),
        Case("one_token", t=1, s=1),
        Case("decode", t=1, s=130, n=4, nk=2, dtype="bfloat16", kv_lengths=(130, 7), poison=True),
        Case("cross", t=40, s=192, d_lse=True),
        Case("long_query", t=192, s=40, dv=48),
        Case("no_queries", t=0, s=9, bias="11TS"),
        Case("no_keys", t=9, s=0, bias="1NTS", d_lse=True),
        Case("no_batch", b=0, t=9, s=9),
        Case("value_dim_wider", dv=80, d=24, dtype="bfloat16"),
        Case("scale", scale=0.3),
        Case("causal", causal=True, d_lse=True),
        Case("causal_f16", causal=True, dtype="float16", t=128, s=128),
        Case("causal_cross", causal=True, t=70, s=150),
        Case("causal_cross_short", causal=True, t=150, s=70, dtype="bfloat16"),
        Case("bottom_right", causal=True, alignment="bottom_right", t=70, s=150),
        Case("bottom_right_empty_rows", causal=True, alignment="bottom_right", t=150, s=70, d_lse=True),
        Case("bottom_right_lengths", **causal_lengths, poison=True, d_lse=True),
        Case("bottom_right_lengths_bf16", **causal_lengths, poison=True, dtype="bfloat16", n=4),
        Case("window_left", causal=True, window=(2, 0), t=192, s=192),
        Case("window_both", window=(3, 5), t=192, s=192, d_lse=True),
        Case("window_right", window=(None, 7)),
        Case("window_left_open_right", window=(9, None), dtype="bfloat16"),
        Case("window_wider_than_keys", window=(2**31 - 2, 2**31 - 2)),
        Case("window_bottom_right", window=(10, 3), alignment="bottom_right", t=60, s=170),
        Case("window_bottom_right_lengths", window=(6, 2), alignment="bottom_right",
             q_lengths=(97, 20), kv_lengths=(41, 90), poison=True),
        Case("window_past_the_keys", window=(4, 4), t=180, s=60),
        Case("mqa", n=8, nk=1, causal=True),
        Case("gqa_bf16", n=6, nk=2, dtype="bfloat16", causal=True, d_lse=True),
        Case("gqa_bias", n=6, nk=2, bias="BNTS", d_lse=True),
        Case("bias_1NTS", bias="1NTS", d_lse=True),
        Case("bias_BNTS_causal", bias="BNTS", causal=True),
        Case("bias_11TS", bias="11TS", n=4, nk=2),
        Case("bias_B11S", bias="B11S", n=4, nk=1),
        Case("bias_1N1S", bias="1N1S", n=4, nk=2, window=(30, 30)),
        Case("bias_BNT1", bias="BNT1", d_lse=True),
        Case("bias_1111", bias="1111", d_lse=True),
        Case("bias_float32_for_bf16", bias="1NTS", bias_dtype="float32", dtype="bfloat16", b=3, n=4, t=128, s=128),
        Case("bias_bf16", bias="B1TS", dtype="bfloat16"),
        Case("bias_far_below", bias="1NTS", bias_shift=-100.0, t=192, s=192, d_lse=True),
        Case("bias_lengths", bias="BNTS", q_lengths=(97, 31), kv_lengths=(24, 90), poison=True),
        Case("bias_shared_lengths", bias="11TS", q_lengths=(80, 31), kv_lengths=(24, 70), poison=True, causal=True),
        Case("mask_B11S", mask="B11S", d_lse=True),
        Case("mask_BNTS", mask="BNTS", dtype="bfloat16"),
        Case("mask_11TS", mask="11TS", n=4, nk=2, d_lse=True),
        Case("mask_1NT1", mask="1NT1"),
        Case("mask_all_true", mask="11TS", full_mask=True, bias="1NTS", bias_shift=-100.0),
        Case("mask_bias_causal", mask="B1TS", bias="1N1S", causal=True, n=4, nk=2, d_lse=True),
        Case("lengths", q_lengths=(97, 0), kv_lengths=(64, 97), poison=True, d_lse=True),
        Case("lengths_zero_keys", q_lengths=(97, 50), kv_lengths=(0, 64), poison=True, dtype="bfloat16"),
        Case("lengths_keys_only", kv_lengths=(24, 96), poison=True, causal=True),
        Case("lengths_queries_only", q_lengths=(1, 96), poison=True, causal=True, dtype="float16"),
        Case("lengths_all_zero", q_lengths=(0, 0), kv_lengths=(0, 0), poison=True, bias="BNTS"),
        Case("lengths_mask", kv_lengths=(24, 96), q_lengths=(97, 90), poison=True, mask="11TS"),
    ]  # fmt: skip


CASES = _grid()
BY_NAME = MappingProxyType({case.name: case for case in CASES})
