"""Small attention graphs, one for each option beyond `cudnn_jax.sdpa` at least, and legal arrays for their inputs.

A sample's tensors bear the names of their ports, and lie as (B, T, N, D) in memory. A backward's o and stats are what
the reference's forward makes of the same arrays. Around packed sequences there is noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cudnn_jax import pygraph
from cudnn_jax.graph import Tensor

B, N, NK, T, S, D = 3, 4, 2, 128, 256, 64
SCALE = D**-0.5
PAGE = 64
NOISE = 1e3
"""In memory that belongs to no sequence."""
KEPT = 0.75
"""Of what a dropout's mask or a mask of keys sees."""

Array = np.ndarray[Any, Any]
Dims = tuple[int, ...]
NOTHING: Mapping[str, Any] = MappingProxyType({})
SIDES = {
    **dict.fromkeys(("q", "o", "dO", "O", "dQ"), "q"),
    **dict.fromkeys(("k", "v", "dK", "dV"), "kv"),
    **dict.fromkeys(("stats", "Stats", "dStats", "score_max", "score_sum_exp"), "stats"),
}
"""Port -> what it is packed with."""
ROW = {"q": N * D, "kv": NK * D, "stats": N}
"""Elements of a row of all heads."""
NEEDED = {False: ("q", "k", "v"), True: ("q", "k", "v", "o", "dO", "stats")}
DROPOUT = ("dropout_mask", "dropout_scale", "dropout_scale_inv")
PAGES = {f"paged_attention_{side}_table": side for side in "kv"}
OTHER_TYPES = {
    **dict.fromkeys((*SIDES, "bias", "dBias", "dropout_mask"), "bfloat16"),
    **dict.fromkeys(("stats", "Stats", "dStats", "score_max", "score_sum_exp"), "float32"),
    **dict.fromkeys((*PAGES, "seq_len_q", "seq_len_kv", "cu_seq_len_q", "cu_seq_len_kv", "seed", "offset"), "int32"),
    **dict.fromkeys(("starts of q", "starts of kv", "starts of stats"), "int32"),
    "block_mask": "uint8",
    "kv_mask": "int8",
}
"""What is not float32 is in this table."""


class Sequences(NamedTuple):
    """Lengths, and the rows where sequences begin in packed memory: B + 1 of these."""

    lengths: Dims
    starts: Dims


TIGHT = {"q": Sequences((128, 57, 96), (0, 128, 185, 281)), "kv": Sequences((256, 40, 129), (0, 256, 296, 425))}
APART = {"q": Sequences((57, 0, 96), (0, 60, 60, 188)), "kv": Sequences((140, 40, 129), (0, 192, 256, 512))}
"""With room behind sequences, and one without queries."""


@dataclass(frozen=True)
class Sample:
    """One attention graph, of `sdpa` or of `sdpa_backward`.

    Attributes:
      t, s: the (longest) queries and keys.
      ports: the optional ports that are wired.
      numbers: port -> the number of the graph's own that is wired there.
      given: the outputs that the caller makes.
      params: the operation's attributes.
      packed: the sides whose tensors are ragged, of "q", "kv" and "stats".
      sequences: lengths and places, where `ports` or `packed` ask for them.
      types: port -> data type, where it is not the usual one.
    """

    backward: bool = False
    t: int = T
    s: int = S
    ports: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=lambda: NOTHING, hash=False)
    given: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=lambda: NOTHING, hash=False)
    packed: tuple[str, ...] = ()
    sequences: Mapping[str, Sequences] = field(default_factory=lambda: TIGHT, hash=False)
    types: Mapping[str, str] = field(default_factory=lambda: NOTHING, hash=False)

    def __call__(self, graph: pygraph) -> tuple[Tensor, ...]:
        """Adds the node to a graph; returns its outputs."""
        starts: dict[str, Tensor] = {}

        def offset(port: str) -> Tensor | None:
            side = SIDES.get(port)
            if side not in self.packed:
                return None
            if side not in starts:
                starts[side] = tensor(f"starts of {side}")
            return starts[side]

        def tensor(port: str) -> Tensor:
            dim, kind = self.dim(port), self.type(port)
            return graph.tensor(dim, self.stride(port), kind, port, ragged_offset=offset(port))

        wired = {port: tensor(port) for port in (*NEEDED[self.backward], *self.ports)}
        wired |= {port: graph.scalar(number, "float32") for port, number in self.numbers.items()}
        dropout = tuple(wired.pop(port) for port in DROPOUT if port in wired)
        if "seed" in wired:
            dropout = (0.0, wired.pop("seed"), wired.pop("offset"))
        keywords = dict(self.params)
        keywords |= {"dropout": dropout} if dropout else {}
        if not {"attn_scale", "attn_scale_prefolded"} & {*wired, *keywords}:
            keywords["attn_scale"] = SCALE
        own = {port: tensor(port) for port in self.given}
        if self.backward:
            made = dict(zip(("dQ", "dK", "dV"), graph.sdpa_backward(**wired, **own, **keywords), strict=False))
        else:
            keywords.setdefault("generate_stats", True)
            made = dict(zip(("O", "Stats"), graph.sdpa(**wired, **own, **keywords), strict=True))
        made = {port: each for port, each in made.items() if each is not None}
        for port, each in made.items():
            each.set_dim(self.dim(port)).set_stride(self.stride(port)).set_data_type(self.type(port))
            if (where := offset(port)) is not None:
                each.set_ragged_offset(where)
        return (*made.values(), *own.values())

    def type(self, port: str) -> str:
        return self.types.get(port, OTHER_TYPES.get(port, "float32"))

    def dim(self, port: str) -> Dims:
        if port in ("k", "v") and any(PAGES.get(each) == port for each in self.ports):
            return (B * self.s // PAGE, NK, PAGE, D)
        plane = (N, self.t, self.s)
        dims = {
            **{each: (B, N, self.t, D) for each, side in SIDES.items() if side == "q"},
            **{each: (B, NK, self.s, D) for each, side in SIDES.items() if side == "kv"},
            **{each: (B, N, self.t, 1) for each, side in SIDES.items() if side == "stats"},
            **{f"starts of {side}": (B + 1, 1, 1, 1) for side in ROW},
            **{f"{kind}_{side}": (B + more, 1, 1, 1) for kind, more in LENGTHS.items() for side in TIGHT},
            **dict.fromkeys(PAGES, (B, 1, self.s // PAGE, 1)),
            **dict.fromkeys(("bias", "dBias"), (1, *plane)),
            **dict.fromkeys(("dropout_mask", "rng_dump"), (B, *plane)),
            **dict.fromkeys(("sink_token", "dSink_token"), (1, N, 1, 1)),
            "kv_mask": (B, 1, 1, self.s),
            "block_mask": (B, N, -(-self.t // 128), -(-self.s // 1024)),
        }
        return dims.get(port, (1, 1, 1, 1))

    def stride(self, port: str) -> Dims:
        dim = self.dim(port)
        _, n, t, d = dim
        side = SIDES.get(port)
        if side in ("q", "kv") or side in self.packed:
            return (t * n * d, d, n * d, 1)
        return (n * t * d, t * d, d, 1)

    def arrays(self, graph: pygraph, rng: np.random.Generator) -> list[Array]:
        """An array for each of the graph's inputs."""
        names = [tensor.name for tensor in graph.inputs]
        given = {name: self._drawn(name, rng) for name in names}
        if self.backward:
            given |= self._kept(given)
        return [given[name].reshape(self.dim(name)).astype(_dtype(self.type(name))) for name in names]

    def _kept(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """The forward's O and Stats."""
        import jax

        from cudnn_jax.engines import planning
        from cudnn_jax.engines.target import CPU

        taken = tuple(port for port in self.ports if port not in ("dStats", "dropout_scale_inv"))
        kept = {"use_deterministic_algorithm"}
        params = {name: value for name, value in self.params.items() if name not in kept}
        forward = replace(self, backward=False, ports=taken, given=(), params=params, types={})
        graph = pygraph("forward", io_data_type="bfloat16")
        o, stats = forward(graph)
        for tensor in (o, stats):
            tensor.set_output(True)
        graph.freeze()
        inputs = [given[x.name].reshape(x.dim).astype(_dtype(x.data_type.value)) for x in graph.inputs]
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            made = jax.jit(planning.plan(graph, CPU, "xla").artifact.fn)(*inputs)
        found = {id(tensor): np.asarray(array) for tensor, array in zip(graph.outputs, made, strict=True)}
        return {"o": found[id(o)], "stats": found[id(stats)]}

    def _drawn(self, name: str, rng: np.random.Generator) -> Array:
        dim = self.dim(name)
        if name in PAGES:
            return rng.permutation(B * self.s // PAGE)
        if name in ("dropout_mask", "kv_mask"):
            return rng.random(dim) < KEPT
        if name == "block_mask":
            return rng.integers(1, 4, dim)  # of two tiles of keys, one at least
        for kind in ("seq_len", "cu_seq_len", "starts of"):
            if name.startswith(kind):
                return self._of_sequences(kind, name.removeprefix(kind)[1:])
        numbers = {"attn_scale": SCALE, "dropout_scale": 1 / KEPT, "dropout_scale_inv": KEPT, "seed": 7, "offset": 3}
        if name in numbers:
            return np.array(numbers[name])
        return self._packed(name, rng) if SIDES.get(name) in self.packed else rng.standard_normal(dim)

    def _of_sequences(self, kind: str, side: str) -> Array:
        sequences = self.sequences["kv" if side == "kv" else "q"]
        if kind == "starts of":
            return np.array(sequences.starts) * ROW[side]
        lengths = np.array(sequences.lengths)
        return lengths if kind == "seq_len" else np.array([0, *np.cumsum(lengths)])

    def _packed(self, name: str, rng: np.random.Generator) -> Array:
        """Memory (B * T, N, D) under the dims (B, N, T, D)."""
        b, n, t, d = self.dim(name)
        memory = NOISE * rng.standard_normal((b * t, n, d))
        lengths, starts = self.sequences["kv" if SIDES[name] == "kv" else "q"]
        for length, start in zip(lengths, starts, strict=False):
            memory[start : start + length] = rng.standard_normal((length, n, d))
        return memory.reshape(b, t, n, d).swapaxes(1, 2)


def _dtype(name: str) -> np.dtype[Any]:
    import jax.numpy as jnp

    return jnp.dtype(name)


LENGTHS = {"seq_len": 0, "cu_seq_len": 1}
"""A port's first words -> how many more entries than sequences it has."""
BY_LENGTHS: dict[str, Any] = {"ports": ("seq_len_q", "seq_len_kv"), "params": {"use_padding_mask": True}}
TABLES: dict[str, Any] = {
    "ports": (*BY_LENGTHS["ports"], *PAGES),
    "params": {"use_padding_mask": True, "paged_attention_max_seq_len_kv": S, "generate_stats": False},
}
ALL = ("q", "kv")
CAUSAL = {"diagonal_band_right_bound": 0}
FROM_BELOW = CAUSAL | {"diagonal_alignment": "BOTTOM_RIGHT"}
SCORES = ("score_max", "score_sum_exp")


def under_lengths(*ports: str, **more: Any) -> Sample:
    """Sequences of several lengths."""
    params = BY_LENGTHS["params"] | more.pop("params", {})
    return Sample(ports=(*BY_LENGTHS["ports"], *ports), params=params, **more)


IN_BOTH = {
    "attn_scale": Sample(ports=("attn_scale",)),
    "attn_scale as a number": Sample(numbers={"attn_scale": 0.2}),
    "attn_scale_prefolded": Sample(params={"attn_scale_prefolded": True}),
    "alibi": Sample(t=S, params={"use_alibi_mask": True, **CAUSAL}),
    "alibi of fewer queries": Sample(params={"use_alibi_mask": True, **CAUSAL}),
    "alibi under lengths": under_lengths(params={"use_alibi_mask": True, **CAUSAL}),
    "bias as a number": Sample(numbers={"bias": 0.5}),
    "dropout": Sample(ports=("dropout_mask", "dropout_scale")),
    "dropout of nothing": Sample(ports=("seed", "offset"), given=("rng_dump",)),
    "softmax_precision": Sample(params={"softmax_precision": "bfloat16"}),
    "packed": under_lengths(packed=ALL),
    "packed stats": under_lengths(packed=(*ALL, "stats")),
    "packed with gaps": under_lengths(packed=ALL, sequences=APART),
    "packed stats with gaps": under_lengths(packed=(*ALL, "stats"), sequences=APART),
    "packed queries": under_lengths(packed=("q",)),
    "packed keys": under_lengths(packed=("kv",)),
    "packed causal": under_lengths(packed=(*ALL, "stats"), params=FROM_BELOW),
    "packed totals": under_lengths(
        packed=(*ALL, "stats"), params={"max_total_seq_len_q": B * T, "max_total_seq_len_kv": B * S}
    ),
}
"""What follows the operation's name -> the forward; the backward is its own."""

WITHOUT_STATS: dict[str, Any] = {"generate_stats": False}
FORWARD = {
    "kv_mask": Sample(ports=("kv_mask",)),
    "sink": Sample(ports=("sink_token",)),
    "sink under lengths": under_lengths("sink_token", params=FROM_BELOW),
    "packed sink": under_lengths("sink_token", packed=(*ALL, "stats")),
    "scores": Sample(given=SCORES, params=WITHOUT_STATS),
    "scores and stats": Sample(given=SCORES),
    "scores with a sink": Sample(ports=("sink_token",), given=SCORES, params=WITHOUT_STATS),
    "scores under lengths": under_lengths(given=SCORES, params=WITHOUT_STATS),
    "score_max": Sample(given=SCORES[:1], params=WITHOUT_STATS),
    "block_mask": Sample(t=S, ports=("block_mask",)),
    "cu_seq_len": Sample(ports=("cu_seq_len_q", "cu_seq_len_kv"), params={"use_padding_mask": True}),
    "pages": Sample(**TABLES),
    "pages of keys": Sample(**TABLES | {"ports": (*BY_LENGTHS["ports"], "paged_attention_k_table")}),
    "packed queries and pages": Sample(**TABLES, packed=("q",)),
    "stats_use_log2": Sample(params={"stats_use_log2": True}),
    "COMPOSITE": Sample(params={"implementation": "COMPOSITE"}),
    "UNIFIED": Sample(params={"implementation": "UNIFIED"}),
    "unfuse_fma": Sample(params={"unfuse_fma": True}),
    "float32 output": Sample(types={"O": "float32"}),
    "float16 values": Sample(types={"v": "float16"}),
}

BACKWARD = {
    "dSink_token": Sample(ports=("sink_token",), given=("dSink_token",)),
    "dSink_token under lengths": under_lengths("sink_token", given=("dSink_token",), params=FROM_BELOW),
    "packed dSink_token": under_lengths("sink_token", packed=(*ALL, "stats"), given=("dSink_token",)),
    "packed dBias": under_lengths("bias", packed=ALL, given=("dBias",)),
    "dStats": Sample(ports=("dStats",)),
    "dropout and its inverse": Sample(ports=DROPOUT),
    "float32 gradients": Sample(types=dict.fromkeys(("dQ", "dK", "dV"), "float32")),
    "float16 cotangent": Sample(types={"dO": "float16"}),
}

SAMPLES = {f"sdpa {name}": sample for name, sample in (IN_BOTH | FORWARD).items()}
SAMPLES |= {f"sdpa_backward {name}": replace(sample, backward=True) for name, sample in (IN_BOTH | BACKWARD).items()}
