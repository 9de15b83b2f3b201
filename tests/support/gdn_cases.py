"""Cases of gated delta rules: operands as an engine gets them, and what its outputs must be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from cudnn_jax.engines.planning import pygraph
from support.linear_attention import GATES, PLAIN, Arrays, Options, Sizes, backward, draw, error, forward
from support.linear_graphs import GRADIENTS

TOLERANCES = {"bfloat16": 8e-3, "float16": 5e-3, "float32": 5e-6}
GRADIENT_TOLERANCES = {"bfloat16": 1.5e-2, "float16": 1e-2}
HARD = ("correlated",)
"""Kinds of inputs whose gradients in bfloat16 may be off by HARD_TOLERANCE."""
HARD_TOLERANCE = 2.5e-2


@dataclass(frozen=True)
class Case:
    """One forward: sizes, options, the kind of inputs (`draw`), and types.

    `gates` is the type of g, beta, a_log and dt_bias, `state` of initial_state. With a `pool` of so many rows the
    initial states lie in some of it; one sequence has no row. `overwrite` gives the pool back as final_state.
    """

    sizes: Sizes
    options: Options = PLAIN
    kind: str = "mild"
    dtype: str = "bfloat16"
    gates: str = "float32"
    state: str = "float32"
    cu: str = "int32"
    without: tuple[str, ...] = ()
    pool: int = 0
    overwrite: bool = False
    final: bool = True
    operation: str = "gdn"

    @property
    def by_channel(self) -> bool:
        """Whether every key channel has a gate of its own."""
        return GATES[self.operation]["g"] == "K"

    def __str__(self) -> str:
        flags = [name for name, value in asdict(self.options).items() if value not in (None, False, 0, "log")]
        sizes = self.sizes
        words = [] if self.operation == "gdn" else [self.operation]
        words += [self.kind, self.dtype, f"{sizes.lengths}", f"{sizes.heads}", f"K{sizes.key_dim}V{sizes.value_dim}"]
        words += flags + [f"no-{name}" for name in self.without]
        words += [f"pool{self.pool}"] if self.pool else []
        return " ".join(words + (["overwrite"] if self.overwrite else []))

    def draw(self, rng: np.random.Generator) -> Arrays:
        """Operands by port, in their types."""
        types = dict.fromkeys(("q", "k", "v"), self.dtype) | {"initial_state": self.state, "cu_seqlens": self.cu}
        drawn = draw(rng, self.sizes, self.options, self.kind, self.without, self.operation)
        made = {name: np.asarray(x).astype(jnp.dtype(types.get(name, self.gates))) for name, x in drawn.items()}
        if not self.pool:
            return made
        rows = rng.permutation(self.pool)[: len(self.sizes.lengths)].astype(np.int32)
        rows[-1] = self.pool + 3
        pool = rng.standard_normal((self.pool, *self.sizes.states[1:]))
        return made | {"initial_state": pool.astype(jnp.dtype(self.state)), "state_indices": rows}

    def graph(self, given: Arrays) -> pygraph:
        """Every output is asked for, the final state if `final`."""
        graph = pygraph(io_data_type=self.dtype)
        tensors = {name: graph.tensor(x.shape, data_type=x.dtype.name, name=name) for name, x in given.items()}
        options = self.options.attributes()
        build = getattr(graph, self.operation)
        build(**tensors, **options, output_final_state=self.final, overwrite_initial_state=self.overwrite)
        for tensor in graph.nodes[0].outputs.values():
            tensor.set_output(True)
        return graph

    def expected(self, given: Arrays) -> Arrays:
        """The float64 outputs by name."""
        operands = {name: x for name, x in given.items() if name != "state_indices"}
        rows = given.get("state_indices")
        if rows is not None:
            pool = np.asarray(given["initial_state"], np.float64)
            known = (rows >= 0) & (rows < len(pool))
            operands["initial_state"] = np.where(known[:, None, None, None], pool[np.where(known, rows, 0)], 0)
        made = forward(operands, self.options)
        if rows is not None and self.overwrite:
            pool = pool.copy()
            pool[rows[known]] = made["final_state"][known]
            made["final_state"] = pool
        every = self.options.checkpoint_every_n_tokens
        if every:
            kept = made["state_checkpoints"]
            behind = np.zeros((self.sizes.total // every - len(kept), *kept.shape[1:]))
            made["state_checkpoints"] = np.concatenate([kept, behind])
        return made

    def check(self, graph: pygraph, got: list[Any], want: Arrays, given: Arrays) -> None:
        """Each output against `want`; rows that belong to no sequence are exactly 0."""
        for name, array in by_name(graph, got).items():
            found = error(array, want[name], usual=_usual(name, self.sizes, self.by_channel))
            tolerance = max(TOLERANCES[self.dtype], TOLERANCES[graph.nodes[0].outputs[name].data_type.value])
            assert found <= tolerance, f"{name}: error {found}"
            if name == "O" and self.sizes.tail:
                assert not np.any(np.asarray(array, np.float64)[-self.sizes.tail :]), "rows of no sequence"


def by_name(graph: pygraph, got: list[Any]) -> dict[str, Any]:
    """The outputs of a graph of one node by its results' names."""
    names = {id(tensor): name for name, tensor in graph.nodes[0].outputs.items()}
    return {names[id(tensor)]: array for tensor, array in zip(graph.outputs, got, strict=True)}


def _usual(name: str, sizes: Sizes, by_channel: bool) -> float:
    """The size of an element where inputs are of the size of 1; that of a sum grows as the root of its terms."""
    sums = {"d_a_log": sizes.total * (sizes.key_dim if by_channel else 1), "d_dt_bias": sizes.total}
    return sizes.key_dim**-0.5 if name == "O" else sums.get(name, 1) ** 0.5


def _spread(name: str, given: Arrays, want: Arrays) -> float:
    """The norm that a sum over tokens has where the signs of its terms are any: what is left where they cancel is known
    no better. 0 of what is no such sum."""
    if name not in ("d_a_log", "d_dt_bias"):
        return 0.0
    terms = want["dG"]
    if name == "d_a_log":
        raw = np.asarray(given["g"], np.float64) + np.asarray(given.get("dt_bias", 0.0), np.float64)
        by_rate = raw if raw.ndim == 3 else np.logaddexp(0, raw) * (1 + np.exp(-raw))
        terms = np.where(terms != 0, terms * by_rate, 0)
    return float(np.linalg.norm(terms))


@dataclass(frozen=True)
class BackwardCase(Case):
    """One backward: a forward's operands and the cotangents of O and, if `final`, of the final state."""

    def draw(self, rng: np.random.Generator) -> Arrays:
        made = super().draw(rng)
        sizes = self.sizes
        out = rng.standard_normal((sizes.total, sizes.gates, sizes.value_dim)).astype(jnp.dtype(self.dtype))
        made |= {"dO": out}
        if self.final:
            made |= {"d_final_state": rng.standard_normal(sizes.states).astype(np.float32)}
        return made

    def graph(self, given: Arrays) -> pygraph:
        """Every gradient is asked for."""
        graph = pygraph(io_data_type=self.dtype)
        tensors = {name: graph.tensor(x.shape, data_type=x.dtype.name, name=name) for name, x in given.items()}
        getattr(graph, f"{self.operation}_bwd")(**tensors, **self.options.attributes())
        for tensor in graph.nodes[0].outputs.values():
            tensor.set_output(True)
        return graph

    def expected(self, given: Arrays) -> Arrays:
        operands = {name: x for name, x in given.items() if name not in ("dO", "d_final_state")}
        made = backward(operands, given["dO"], given.get("d_final_state"), self.options)
        inside = len(given["dO"]) - self.sizes.tail
        for name in {"q", "k", "v", "g", "beta", "w"} & made.keys():
            made[name][inside:] = 0
        return {name: made[port] for name, port in GRADIENTS.items() if port in made}

    def check(self, graph: pygraph, got: list[Any], want: Arrays, given: Arrays) -> None:
        """Each gradient against `want`; rows that belong to no sequence are exactly 0."""
        tolerance = GRADIENT_TOLERANCES[self.dtype]
        if self.kind in HARD and self.dtype == "bfloat16":
            tolerance = HARD_TOLERANCE
        named = by_name(graph, got)
        assert set(named) == set(want)
        for name, array in named.items():
            usual = _usual(name, self.sizes, self.by_channel)
            found = error(array, want[name], usual, least=_spread(name, given, want))
            assert found <= tolerance, f"{name}: error {found}"
            if len(array) == self.sizes.total and self.sizes.tail:
                assert not np.any(np.asarray(array, np.float64)[-self.sizes.tail :]), f"{name}: rows of no sequence"
