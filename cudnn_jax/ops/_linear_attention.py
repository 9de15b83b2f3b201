"""What the linear attention operations share: their arguments, packing, derivative, graphs and rules.

An operation is a `LinearAttention`: the shapes of its gates, and what its raw gates mean. Operands and results bear the
names of the graph's ports. Batched operands (B, T, ...) become packed sequences of T tokens each without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from cudnn_jax.engines.linear_attention import _inputs
from cudnn_jax.engines.manifest import FAMILIES
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.graph import Tensor, data_type
from cudnn_jax.graph.linear_attention import GATE_LOWER_BOUND, GRADIENTS, LONGEST_INTERVAL
from cudnn_jax.ops import _arguments as check
from cudnn_jax.ops import _linear_stacked
from cudnn_jax.ops._primitive import Avals, BuiltGraph, Operation, match_manual_axes, register
from cudnn_jax.ops._sharding import BATCH, HEADS, Axes

_IO = (jnp.bfloat16, jnp.float16, jnp.float32)
_STATE = (jnp.float32, jnp.bfloat16)
_ON_DEMAND = ("initial_state", "a_log", "dt_bias")
"""Operands whose gradient is made only where it is asked for."""


@dataclass(frozen=True)
class LinearConfig:
    """Everything about a call that is known while tracing; the options have the graph's names."""

    scale: float
    use_qk_l2norm: bool
    use_beta_sigmoid: bool
    allow_neg_eigval: bool
    safe_gate: bool
    gate_domain: str
    gate_lower_bound: float | None
    checkpoint_every_n_tokens: int
    output_final_state: bool
    overwrite_initial_state: bool
    implementation: str | None
    gradients: frozenset[str] = frozenset()

    def attributes(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


class LinearAttention:
    """One operation.

    Args:
      name: of the function and of the graph's builder; the backward's ends in "_bwd".
      gates: gate -> its axes behind the token's: HO heads, K or V.
      dt_bias: the axes of dt_bias.
      bounded: whether safe gates have a lower bound.
    """

    def __init__(
        self, name: str, gates: Mapping[str, tuple[str, ...]], dt_bias: tuple[str, ...], bounded: bool
    ) -> None:
        self.name = name
        self.gates = gates
        self.dt_bias = dt_bias
        self.bounded = bounded
        common: dict[str, Any] = {"lead": "q", "axes": _axes, "sample": _sample}
        self.forward = register(
            Operation(
                name=f"{name}_fwd",
                build=self._build_forward,
                results=self._forward_results,
                unfolded=self._unfolded_forward,
                stacked=partial(self._stacked, backward=False),
                reverse=self._reverse,
                **common,
            )
        )
        self.backward = register(
            Operation(
                name=f"{name}_bwd",
                build=self._build_backward,
                results=self._backward_results,
                unfolded=self._unfolded_backward,
                stacked=partial(self._stacked, backward=True),
                gradients={gradient: name for name, gradient in GRADIENTS.items()},
                is_reverse=True,
                **common,
            )
        )

    # Calls

    def call(
        self,
        tokens: Mapping[str, Any],
        *,
        cu_seqlens: Any,
        initial_state: Any,
        output_final_state: bool,
        checkpoint_every_n_tokens: int,
        **options: Any,
    ) -> tuple[Any, ...]:
        """The operation over q, k, v and gates: (o, final state or None), and kept states where asked for."""
        lead = ("B", "T") if cu_seqlens is None else ("total",)
        operands = self._check_tokens(tokens, lead)
        every = check.whole_number("checkpoint_every_n_tokens", checkpoint_every_n_tokens, 0, LONGEST_INTERVAL)
        if cu_seqlens is not None:
            operands["cu_seqlens"] = _check_sequences(cu_seqlens, operands["q"].shape[0])
        sequences = operands["q"].shape[0] if cu_seqlens is None else operands["cu_seqlens"].shape[0] - 1
        if initial_state is not None:
            count = "B" if cu_seqlens is None else "n"
            operands["initial_state"] = _check_state("initial_state", initial_state, operands, sequences, count)
        config, own = self._check_options(operands, **options)
        config = replace(
            config,
            output_final_state=check.flag("output_final_state", output_final_state),
            checkpoint_every_n_tokens=every,
        )
        made = self._run(config, operands | own)
        out, final = made["O"], made.get("final_state")
        if not every:
            return out, final
        kept = jax.lax.stop_gradient(made["state_checkpoints"])
        kept = kept.reshape(-1, *kept.shape[2:]) if cu_seqlens is None else kept[: _checkpoints(cu_seqlens, every)]
        return out, final, kept

    def step(
        self, tokens: Mapping[str, Any], *, state: Any, state_indices: Any, **options: Any
    ) -> tuple[jax.Array, jax.Array]:
        """One token of each of B sequences: (o, state)."""
        operands = self._check_tokens(tokens, ("B",))
        batch = operands["q"].shape[0]
        operands = {name: x[:, None] for name, x in operands.items()}
        operands["initial_state"] = _check_state(
            "state", state, operands, batch if state_indices is None else None, "B" if state_indices is None else "P"
        )
        if state_indices is not None:
            indices = check.array("state_indices", state_indices, rank=(1,), layout="(B,)")
            check.dtype("state_indices", indices, (jnp.int32,))
            check.shape("state_indices", indices, (batch,), "one row of the pool for each sequence, (B,)")
            operands["state_indices"] = indices
            if batch and not operands["initial_state"].shape[0]:
                raise ValueError(f"state has shape {state.shape}; the rule: a pool (P, HO, V, K) of at least one row")
        config, own = self._check_options(operands, **options)
        config = replace(config, output_final_state=True, overwrite_initial_state=True)
        made = self._run(config, operands | own)
        return made["O"][:, 0], made["final_state"]

    # Arguments

    def _check_tokens(self, tokens: Mapping[str, Any], lead: tuple[str, ...]) -> dict[str, Any]:
        """q, k, v and gates against each other, their axes in front of the heads being `lead`."""
        heads = {"q": ("H", "K"), "k": ("HK", "K"), "v": ("HV", "V"), **self.gates}
        layouts = {name: _layout((*lead, *axes)) for name, axes in heads.items()}
        made: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        for name, axes in heads.items():
            x = check.array(name, tokens[name], rank=(len(lead) + len(axes),), layout=layouts[name])
            if name in self.gates:
                check.dtype(name, x, (jnp.float32, made["q"].dtype), f"float32 or q's dtype {made['q'].dtype}")
            elif made:
                check.dtype(name, x, (made["q"].dtype,), f"q's dtype {made['q'].dtype}")
            else:
                check.dtype(name, x, _IO)
            named = (*lead, *axes)
            check.shape(name, x, [sizes.get(axis) for axis in named], f"{layouts[name]}, q being {layouts['q']}")
            sizes |= dict(zip(named, x.shape, strict=True))
            if 0 in x.shape[len(lead) :]:
                raise ValueError(f"{name} has shape {x.shape}; the rule: at least one head, and none of width 0")
            made[name] = x
            if name == "v":
                sizes["HO"] = _check_heads(sizes)
        return made

    def _check_options(
        self,
        operands: Mapping[str, Any],
        *,
        scale: Any,
        use_qk_l2norm: Any,
        use_beta_sigmoid: Any,
        allow_neg_eigval: Any,
        safe_gate: Any,
        gate_domain: Any,
        gate_lower_bound: Any,
        a_log: Any,
        dt_bias: Any,
        implementation: Any,
    ) -> tuple[LinearConfig, dict[str, Any]]:
        """The configuration of the options, and the gate's own operands."""
        if gate_domain not in ("log", "linear"):
            raise ValueError(f"gate_domain is {gate_domain!r}; the rule: 'log' or 'linear'")
        safe_gate = check.flag("safe_gate", safe_gate)
        if safe_gate and gate_domain == "linear":
            raise ValueError("safe_gate came with gate_domain 'linear'; the rule: raw logits make a gate in 'log'")
        gate_lower_bound = self._check_bound(gate_lower_bound, safe_gate)
        sizes = {"HO": operands["g"].shape[operands["q"].ndim - 2], "K": operands["q"].shape[-1]}
        own: dict[str, Any] = {}
        for name, given, axes in (("a_log", a_log, ("HO",)), ("dt_bias", dt_bias, self.dt_bias)):
            if given is None:
                continue
            if not safe_gate:
                raise ValueError(f"{name} came without safe_gate; the rule: it is part of a gate of raw logits")
            own[name] = check.array(name, given, rank=(len(axes),), layout=_layout(axes))
            check.dtype(name, own[name], (jnp.float32, operands["q"].dtype), "float32 or q's dtype")
            check.shape(name, own[name], [sizes[axis] for axis in axes], f"{_layout(axes)}, as g has heads")
        config = LinearConfig(
            scale=operands["q"].shape[-1] ** -0.5 if scale is None else check.static_number("scale", scale),
            use_qk_l2norm=check.flag("use_qk_l2norm", use_qk_l2norm),
            use_beta_sigmoid=check.flag("use_beta_sigmoid", use_beta_sigmoid),
            allow_neg_eigval=check.flag("allow_neg_eigval", allow_neg_eigval),
            safe_gate=safe_gate,
            gate_domain=gate_domain,
            gate_lower_bound=gate_lower_bound,
            checkpoint_every_n_tokens=0,
            output_final_state=False,
            overwrite_initial_state=False,
            implementation=check.implementation(implementation, FAMILIES[self.name], self.name),
        )
        return config, own

    def _check_bound(self, bound: Any, safe_gate: bool) -> float | None:
        if not self.bounded:
            if bound is not None:
                raise ValueError(f"gate_lower_bound is {bound!r}; the rule: None, gates of {self.name} have none")
            return None
        if bound is None:
            return GATE_LOWER_BOUND
        if not safe_gate:
            raise ValueError("gate_lower_bound came without safe_gate; the rule: it is part of a gate of raw logits")
        bound = check.static_number("gate_lower_bound", bound)
        if not bound < 0:
            raise ValueError(f"gate_lower_bound is {bound}; the rule: below 0")
        return bound

    # Derivative

    def _run(self, config: LinearConfig, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The forward on operands and with results that remat policies know by name."""
        named = {name: self._named(name, x) for name, x in match_manual_axes(operands).items()}
        return {name: self._named(name, x) for name, x in self.forward.bind(config, named).items()}

    def _named(self, name: str, x: jax.Array) -> jax.Array:
        return checkpoint_name(x, f"cudnn_jax.{self.name}.{'out' if name == 'O' else name}")

    def _reverse(
        self,
        config: LinearConfig,
        operands: Mapping[str, Any],
        kept: Sequence[Any],
        moving: frozenset[str],
        cotangents: Sequence[Any],
    ) -> Mapping[str, Any]:
        if "state_indices" in operands:
            raise NotImplementedError(
                f"{self.name}_step has no derivative through a pool of states: give the rows themselves as state"
            )
        results = self._forward_results(config, {name: jax.typeof(x) for name, x in operands.items()})
        given = dict(zip(results, cotangents, strict=True))
        out, d_final = results["O"], given.get("final_state")
        wired = dict(operands) | {"dO": jnp.zeros(out.shape, out.dtype) if given["O"] is None else given["O"]}
        if d_final is not None:
            wired["d_final_state"] = d_final
        wanted = frozenset(GRADIENTS[name] for name in _ON_DEMAND if name in moving)
        made = self.backward.bind(replace(config, gradients=wanted), match_manual_axes(wired))
        return {name: made[GRADIENTS[name]] for name in moving}

    # Graphs

    def _build_forward(self, config: LinearConfig, avals: Avals) -> BuiltGraph:
        graph, tensors, constants = _start(avals)
        names = (
            "output_final_state",
            "overwrite_initial_state",
            "checkpoint_every_n_tokens",
            *self._attribute_names(),
        )
        made = getattr(graph, self.name)(**tensors, **config.attributes(names))
        results = _outputs(("O", "final_state", "state_checkpoints"), made)
        operands = {name: tensors[name] for name in avals}
        return BuiltGraph(graph, operands, results, constants=constants)

    def _build_backward(self, config: LinearConfig, avals: Avals) -> BuiltGraph:
        graph, tensors, constants = _start(avals)
        made = getattr(graph, f"{self.name}_bwd")(**tensors, **config.attributes(self._attribute_names()))
        names = [gradient for name, gradient in GRADIENTS.items() if name in (*tensors, *_ON_DEMAND)]
        wanted = self._backward_results(config, avals)
        gradients = {name: made for name, made in zip(names, made, strict=True) if name in wanted}
        results = _outputs(tuple(gradients), tuple(gradients.values()))
        return BuiltGraph(graph, {name: tensors[name] for name in avals}, results, constants=constants)

    def _attribute_names(self) -> tuple[str, ...]:
        common = ("scale", "use_qk_l2norm", "use_beta_sigmoid", "allow_neg_eigval", "safe_gate", "gate_domain")
        return (*common, "gate_lower_bound") if self.bounded else common

    def _forward_results(self, config: LinearConfig, avals: Avals) -> dict[str, jax.ShapeDtypeStruct]:
        q, v = avals["q"], avals["v"]
        packed = "cu_seqlens" in avals
        *lead, _, key_dim = q.shape
        heads, value_dim = max(q.shape[-2], v.shape[-2]), v.shape[-1]
        results = {"O": jax.ShapeDtypeStruct((*lead, heads, value_dim), q.dtype)}
        states = (heads, value_dim, key_dim)
        if config.output_final_state:
            sequences = avals["cu_seqlens"].shape[0] - 1 if packed else lead[0]
            shape, dtype = (sequences, *states), jnp.float32
            if "initial_state" in avals:
                initial = avals["initial_state"]
                shape, dtype = initial.shape if config.overwrite_initial_state else shape, initial.dtype
            results["final_state"] = jax.ShapeDtypeStruct(shape, dtype)
        every = config.checkpoint_every_n_tokens
        if every:
            rows = (lead[0] // every,) if packed else (lead[0], max(lead[1] - 1, 0) // every)
            results["state_checkpoints"] = jax.ShapeDtypeStruct((*rows, *states), q.dtype)
        return results

    def _backward_results(self, config: LinearConfig, avals: Avals) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            gradient: jax.ShapeDtypeStruct(avals[name].shape, avals[name].dtype)
            for name, gradient in GRADIENTS.items()
            if name in avals and (name not in _ON_DEMAND or gradient in config.gradients)
        }

    # Under vmap

    def _unfolded_forward(self, config: LinearConfig, operands: Mapping[str, Any]) -> Callable[..., Any] | None:
        if not self._hoists_gate(operands):
            return None
        plain = replace(config, safe_gate=False)

        def run(operands: dict[str, Any]) -> list[Any]:
            rest, _ = _hoisted(config, operands)
            return list(self.forward.bind(plain, rest).values())

        return run

    def _unfolded_backward(self, config: LinearConfig, operands: Mapping[str, Any]) -> Callable[..., Any] | None:
        if not self._hoists_gate(operands):
            return None
        plain = replace(config, safe_gate=False, gradients=config.gradients - {"d_a_log", "d_dt_bias"})

        def run(operands: dict[str, Any]) -> list[Any]:
            rest, back = _hoisted(config, operands)
            made = self.backward.bind(plain, rest)
            made |= back(made["dG"])
            return [made[name] for name in self._backward_results(config, operands)]

        return run

    def _hoists_gate(self, operands: Mapping[str, Any]) -> bool:
        """Whether operands without a batch axis make the gate, which then comes out of the operation to be mapped."""
        return "a_log" in operands or "dt_bias" in operands

    def _stacked(
        self, config: LinearConfig, operands: Mapping[str, Any], *, backward: bool
    ) -> Callable[..., Mapping[str, Any]] | None:
        """Packed sequences and pools have no batch axis to fold into."""
        rules = {"cu_seqlens": _linear_stacked.packed, "state_indices": _linear_stacked.pooled}
        rule = next((rule for name, rule in rules.items() if name in operands), None)
        if rule is None:
            return None
        operation = self.backward if backward else self.forward
        return lambda operands, notes: rule(partial(operation.bind, notes=notes), config, operands)


def _hoisted(
    config: LinearConfig, operands: Mapping[str, Any]
) -> tuple[dict[str, Any], Callable[[jax.Array], dict[str, jax.Array]]]:
    """The operands with the gate's logarithm in place of what makes it, and what takes its gradient back."""
    rest = dict(operands)
    parts = {name: rest.pop(name) for name in ("g", "a_log", "dt_bias") if name in rest}
    wide = {name: x.astype(jnp.float32) for name, x in parts.items()}
    tokens = (0,) if "cu_seqlens" in operands else (0, 1)
    if "a_log" in wide:
        wide["a_log"] = wide["a_log"].reshape(-1, *(1,) * (wide["g"].ndim - len(tokens) - 1))
    rest["g"], to_parts = _inputs.log_gate(config, wide["g"], wide.get("a_log"), wide.get("dt_bias"))

    def back(d_g: jax.Array) -> dict[str, jax.Array]:
        made = to_parts(d_g)
        for name, x in parts.items():
            if name != "g":
                made[name] = made[name].sum(axis=(*tokens, *range(len(tokens) + x.ndim, d_g.ndim)))
        return {GRADIENTS[name]: made[name].astype(x.dtype) for name, x in parts.items()}

    return rest, back


def _axes(config: LinearConfig, avals: Avals) -> Axes:
    """Heads split always, the batch unless sequences are packed or their states are rows of a pool."""
    packed = "cu_seqlens" in avals
    batch = None if packed or "state_indices" in avals else BATCH
    row, state = (HEADS, None), (batch, HEADS, None, None)
    tokens: tuple[str | None, ...] = (None,) if packed else (batch, None)
    made: dict[str, tuple[str | None, ...]] = dict.fromkeys(_linear_stacked.WITH_TOKENS, (*tokens, *row))
    made |= dict.fromkeys(("initial_state", "final_state", "d_initial_state", "d_final_state"), state)
    made |= {"state_checkpoints": (*tokens, *row, None)}
    made |= dict.fromkeys(("a_log", "dt_bias", "d_a_log", "d_dt_bias"), row)
    return made | {"cu_seqlens": (None,), "state_indices": (None,)}


def _sample(config: LinearConfig, avals: Avals, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Equally long sequences, distinct rows of a pool, and tokens under which states neither grow nor vanish."""
    made: dict[str, jax.Array] = {}
    if "cu_seqlens" in avals:
        (count,), total = avals["cu_seqlens"].shape, avals["q"].shape[0]
        made["cu_seqlens"] = jnp.arange(count, dtype=avals["cu_seqlens"].dtype) * (total // max(count - 1, 1))
    if "state_indices" in avals:
        made["state_indices"] = jnp.arange(avals["state_indices"].shape[0], dtype=jnp.int32)
    if not config.use_qk_l2norm:
        made |= {name: _inputs.normalised(arrays[name])[0].astype(avals[name].dtype) for name in ("q", "k")}
    if not config.safe_gate:
        log = -0.1 * jnp.abs(arrays["g"])
        made["g"] = jnp.exp(log) if config.gate_domain == "linear" else log
    if not config.use_beta_sigmoid:
        made["beta"] = jax.nn.sigmoid(arrays["beta"])
    return made


def _start(avals: Avals) -> tuple[pygraph, dict[str, Tensor], list[tuple[Tensor, np.ndarray]]]:
    """A graph with a tensor for each operand, and cu_seqlens where they are known from the batch."""
    packed = "cu_seqlens" in avals
    graph = pygraph(io_data_type=data_type.of(avals["q"].dtype))

    def tensor(name: str, shape: tuple[int, ...], dtype: Any) -> Tensor:
        return graph.tensor(dim=shape, data_type=data_type.of(dtype), name=name)

    tensors = {}
    for name, aval in avals.items():
        flat = not packed and name in _linear_stacked.WITH_TOKENS
        shape = (aval.shape[0] * aval.shape[1], *aval.shape[2:]) if flat else aval.shape
        tensors[name] = tensor(name, shape, aval.dtype)
    if packed:
        return graph, tensors, []
    batch, length = avals["q"].shape[:2]
    starts = np.arange(batch + 1, dtype=np.int32) * np.int32(length)
    tensors["cu_seqlens"] = tensor("cu_seqlens", starts.shape, starts.dtype)
    return graph, tensors, [(tensors["cu_seqlens"], starts)]


def _outputs(names: Sequence[str], made: Sequence[Tensor | None]) -> dict[str, Tensor]:
    return {name: each.set_output(True) for name, each in zip(names, made, strict=True) if each is not None}


# Arguments


def _layout(axes: Sequence[str]) -> str:
    return f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"


def _check_heads(sizes: Mapping[str, int]) -> int:
    heads = max(sizes["H"], sizes["HV"])
    for name, symbol in (("q", "H"), ("k", "HK"), ("v", "HV")):
        if heads % sizes[symbol]:
            raise ValueError(
                f"{name} has {sizes[symbol]} heads; the rule: heads of q, k and v divide HO = {heads}, the larger of "
                f"q's {sizes['H']} and v's {sizes['HV']}"
            )
    return heads


def _check_sequences(cu_seqlens: Any, total: int) -> Any:
    rule = "(n + 1,), where each packed sequence starts and the last one ends"
    made = check.array("cu_seqlens", cu_seqlens, rank=(1,), layout=rule)
    check.dtype("cu_seqlens", cu_seqlens, (jnp.int32, jnp.int64))
    if made.shape[0] == 0:
        raise ValueError(f"cu_seqlens has shape {made.shape}; the rule: {rule}")
    if isinstance(cu_seqlens, np.ndarray):
        if cu_seqlens[0] != 0 or cu_seqlens[-1] > total or np.any(np.diff(cu_seqlens) < 0):
            raise ValueError(f"cu_seqlens is {cu_seqlens}; the rule: from 0, rising, to at most the {total} rows of q")
    return made


def _check_state(name: str, state: Any, operands: Mapping[str, Any], rows: int | None, count: str) -> Any:
    layout = f"({count}, HO, V, K)"
    made = check.array(name, state, rank=(4,), layout=layout)
    check.dtype(name, made, _STATE)
    q, v = operands["q"], operands["v"]
    shape = (rows, max(q.shape[-2], v.shape[-2]), v.shape[-1], q.shape[-1])
    check.shape(name, made, shape, f"{layout}, rows of a state are values")
    return made


def _checkpoints(cu_seqlens: Any, every: int) -> int | None:
    """How many states are kept; None where that is not known while tracing."""
    if isinstance(cu_seqlens, jax.core.Tracer):
        return None
    lengths = np.diff(np.asarray(cu_seqlens))
    return int(np.sum(np.maximum(lengths - 1, 0) // every))
