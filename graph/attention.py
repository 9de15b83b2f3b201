"""The ports and attributes that the attention variants share, each said once; `captured` composes them."""

from __future__ import annotations

from typing import Any

from cudnn_jax.graph import kinds
from cudnn_jax.graph.operation import Attribute, Input, Output
from cudnn_jax.graph.types import data_type

_FLOAT = data_type.FLOAT
_INT32 = data_type.INT32
_SEED = (data_type.INT32, data_type.INT64)
_BITS = (data_type.INT8, data_type.UINT8)
_NO_FUNCTION = "a function over the logits is a graph of its own, which a node cannot hold; write it as bias"


def _port(name: str, shape: str | None, doc: str, *types: data_type, **more: Any) -> Input:
    return Input(name, doc, shape, types=types, **more)


def _maybe(name: str, shape: str | None, doc: str, *types: data_type, **more: Any) -> Input:
    return _port(name, shape, doc, *types, optional=True, **more)


def _flag(name: str, doc: str) -> Attribute:
    return Attribute(name, kinds.flag, doc, default=False)


def _int(name: str, doc: str, **more: Any) -> Attribute:
    return Attribute(name, kinds.integer, doc, **more)


_TILES = "A bit for each tile of 128 rows and keys, the lowest of a byte first: whether it counts"
_ONE_SCALE = "(1, 1, 1, 1) float32; with MXFP8 one for each block of 32, in cuDNN's tiles of 128 x 4 (F8_128x4)"
_TURNED = ("q_T", "k_T", "dO_T")
_WIDE = ("o_f16", "dO_f16")
_DESCALES = {f"descale_{name}": name for name in ("q", "k", "v", "o", "dO", *_TURNED)}
_DESCALES |= {"descale_s": "the softmax", "descale_dP": "the softmax's gradient"}
_SCALES = {"scale_s": "the softmax", "scale_o": "O", "scale_dP": "the softmax's gradient"}
_SCALES |= {f"scale_{name}": name for name in ("dQ", "dK", "dV")}

_PAGED_K = ("paged_attention_k_table", "PAGES_K NK PAGE_K D")
_PAGED_V = ("paged_attention_v_table", "PAGES_V NK PAGE_V DV")

PORTS = {
    port.name: port
    for port in (
        _port("q", "B N T D", "Query, (B, N, T, D)."),
        _port("k", "B NK S D", "Key, (B, NK, S, D); N is a multiple of NK.", replaced=_PAGED_K),
        _port("v", "B NK S DV", "Value, (B, NK, S, DV).", replaced=_PAGED_V),
        _port("o", "B N T DV", "The forward's O, (B, N, T, DV)."),
        _port("dO", "B N T DV", "Cotangent of O, (B, N, T, DV)."),
        _port("stats", "B N T 1", "The forward's Stats, (B, N, T, 1), float32.", _FLOAT),
        *(_port(name, None, f"{name.removesuffix('_T')}, quantised along T or S.") for name in _TURNED),
        *(_port(name, "B N T DV", f"{name.removesuffix('_f16')}, not quantised, (B, N, T, DV).") for name in _WIDE),
        *(_port(name, None, f"Multiplies {of}: {_ONE_SCALE}.") for name, of in _DESCALES.items()),
        *(
            _port(name, "1 1 1 1", f"Multiplies {of} before it is quantised: one number, float32.", _FLOAT)
            for name, of in _SCALES.items()
        ),
        _maybe("dStats", "B N T 1", "Cotangent of Stats, (B, N, T, 1), float32.", _FLOAT),
        _maybe("attn_scale", "1 1 1 1", "Multiplies the logits: a number, or one element.", number=True),
        _maybe("bias", "~B N T S", "Added to the scaled logits; broadcasts to (B, N, T, S)."),
        _maybe("block_mask", None, f"{_TILES}, (B, N, ceil(T / 128), ceil(S / 1024)).", *_BITS),
        _maybe("kv_mask", "~B N T S", "Which keys count; broadcasts to (B, N, T, S)."),
        _maybe("seq_len_q", "B 1 1 1", "True lengths of the queries, (B, 1, 1, 1), int32.", _INT32),
        _maybe("seq_len_kv", "B 1 1 1", "True lengths of keys and values, (B, 1, 1, 1), int32.", _INT32),
        _maybe("cu_seq_len_q", "B+1 1 1 1", "Where each query starts, (B+1, 1, 1, 1), int32.", _INT32),
        _maybe("cu_seq_len_kv", "B+1 1 1 1", "Where each key starts, (B+1, 1, 1, 1), int32.", _INT32),
        _maybe("paged_attention_k_table", "B 1 BLOCKS_K 1", "Pages of the keys, int32.", _INT32),
        _maybe("paged_attention_v_table", "B 1 BLOCKS_V 1", "Pages of the values, int32.", _INT32),
        _maybe("sink_token", "1 N 1 1", "One extra logit for each head, (1, N, 1, 1), float32.", _FLOAT),
        _maybe("seed", "1 1 1 1", "Of the dropout's random numbers.", *_SEED, keyword=False),
        _maybe("offset", "1 1 1 1", "Into the dropout's random numbers.", *_SEED, keyword=False),
        _maybe("dropout_mask", "~B N T S", "The dropout's own mask.", keyword=False),
        _maybe("dropout_scale", "1 1 1 1", "Of what the dropout keeps.", keyword=False),
        _maybe("dropout_scale_inv", "1 1 1 1", "One over dropout_scale.", keyword=False),
    )
}

GIVEN = {
    output.name: output
    for output in (
        Output("rng_dump", "The dropout's random numbers.", shape="B N T S"),
        Output("score_max", "The largest logit of each row, sinks included.", shape="B N T 1", type=_FLOAT),
        Output("score_sum_exp", "The sum of each row's exp(logit - score_max).", shape="B N T 1", type=_FLOAT),
        Output("dBias", "Gradient of bias, summed over the axes that are 1.", shape="~B N T S"),
        Output("sf_o", "The scales of O, where O is quantised in blocks."),
        Output("dSink_token", "Gradient of sink_token.", shape="1 N 1 1", type=_FLOAT),
    )
}

_ALIGNMENT = kinds.choice("TOP_LEFT", "BOTTOM_RIGHT")
_IMPLEMENTATION = kinds.choice("AUTO", "COMPOSITE", "UNIFIED", absent="AUTO")

ATTRIBUTES = {
    attribute.name: attribute
    for attribute in (
        Attribute("is_inference", kinds.flag, "The opposite of generate_stats."),
        Attribute("generate_stats", kinds.flag, "Whether Stats is an output; not if absent."),
        _flag("use_alibi_mask", "Whether logits fall with distance, at a slope for each head."),
        _flag("use_padding_mask", "Whether rows and keys past the sequence lengths are masked."),
        _flag("use_causal_mask", "Whether row i attends to keys j <= i only."),
        _flag("use_causal_mask_bottom_right", "Causal, and the last row sees the last key."),
        _int("sliding_window_length", "Another spelling of diagonal_band_left_bound."),
        Attribute("diagonal_alignment", _ALIGNMENT, "The corner that bounds count from.", default="TOP_LEFT"),
        _int("diagonal_band_left_bound", "Keys j > i - bound are kept."),
        _int("diagonal_band_right_bound", "Keys j <= i + bound are kept."),
        Attribute("dropout", kinds.number, "(probability, seed, offset), or (mask, scale) as tensors."),
        _int("paged_attention_max_seq_len_kv", "S, where keys and values are paged.", binds="S"),
        _int("max_total_seq_len_q", "Bound of the packed query tokens."),
        _int("max_total_seq_len_kv", "Bound of the packed key tokens."),
        _int("sliding_window", "Another spelling of left_bound."),
        _int("left_bound", "Keys j > i - bound are kept."),
        _int("right_bound", "Keys j <= i + bound are kept."),
        Attribute("fn", kinds.unserved(_NO_FUNCTION), "Refused: " + _NO_FUNCTION + "."),
        Attribute("score_mod", kinds.unserved(_NO_FUNCTION), "Refused: " + _NO_FUNCTION + "."),
        Attribute("score_mod_bprop", kinds.unserved(_NO_FUNCTION), "Refused, as score_mod."),
        Attribute("implementation", _IMPLEMENTATION, "How cuDNN builds the operation."),
        _flag("unfuse_fma", "Whether a multiply and its add round separately."),
        _flag("stats_use_log2", "Whether Stats is in base 2."),
        Attribute("softmax_precision", kinds.text, "The precision that an engine may use in the softmax."),
        _flag("attn_scale_prefolded", "Whether q holds attn_scale * log2(e) already; attn_scale stays away."),
        _flag("use_deterministic_algorithm", "The same bits on every run."),
    )
}
