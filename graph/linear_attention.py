"""Linear attention of the structured table: gated delta rules, forward and backward, over packed sequences.

T tokens of N sequences stand behind each other. H, HK and HV are the heads of q, k and v; HO = max(H, HV) those of
gates, outputs and states. Head h of HO reads head h // (HO / heads) of q, k and v. K is the key dim, V the value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cudnn_jax.graph import kinds
from cudnn_jax.graph.layout import row_major
from cudnn_jax.graph.operation import Attribute, Derivative, Input, Layout, Operation, Output, Symbols
from cudnn_jax.graph.shapes import at_least_one, dense, dims_of, refuse, same_as
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.tensor import Tensor
    from cudnn_jax.graph.transposed import Term, Transposed

_FLOAT = data_type.FLOAT
_IO = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16)
_STATE = (data_type.FLOAT, data_type.BFLOAT16)
_CHECKPOINTS = "T // checkpoint_every_n_tokens"
GATE_LOWER_BOUND = -5.0
"""Of a safe gate that has one and is given none."""
LONGEST_INTERVAL = 2**31 - 1
"""Of `checkpoint_every_n_tokens`: tokens are counted in int32."""


def _port(name: str, shape: str | None, doc: str, *types: data_type | str, **more: Any) -> Input:
    return Input(name, doc, shape, types=types, **more)


def _maybe(name: str, shape: str | None, doc: str, *types: data_type | str, **more: Any) -> Input:
    return _port(name, shape, doc, *types, optional=True, **more)


_PORTS = {
    port.name: port
    for port in (
        _port("q", "T H K", "Query, (T, H, K): float32, float16 or bfloat16.", *_IO),
        _port("k", "T HK K", "Key, (T, HK, K), q's type.", "q"),
        _port("v", "T HV V", "Value, (T, HV, V), q's type.", "q"),
        _port("g", None, "Gate, {dims}: gate_domain says of what. float32 or q's type.", _FLOAT, "q"),
        _port("beta", None, "{what}, {dims}, float32 or q's type.", _FLOAT, "q"),
        _port("w", None, "How much of each value is written, {dims}, float32 or q's type.", _FLOAT, "q"),
        _port(
            "cu_seqlens",
            "N+1",
            "Where each sequence starts, (N+1), rising. Rows of T past the last give 0 and take no gradient.",
            data_type.INT32,
            data_type.INT64,
        ),
        _port("dO", "T HO V", "Cotangent of O, (T, HO, V), q's type.", "q"),
        _maybe(
            "state_checkpoints",
            None,
            f"The forward's, ({_CHECKPOINTS}, HO, V, K): what an engine may start from.",
            "q",
        ),
        _maybe(
            "initial_state",
            "N HO V K",
            "(N, HO, V, K), or the pool (P, HO, V, K) that state_indices point into; float32 or bfloat16. 0 if absent.",
            *_STATE,
            replaced=("state_indices", "P HO V K"),
        ),
        _maybe("d_final_state", "N HO V K", "Cotangent of final_state, (N, HO, V, K), float32 or bfloat16.", *_STATE),
        _maybe("a_log", "HO", "Logarithm of each head's decay rate, (HO), with safe_gate; 0 if absent.", _FLOAT, "q"),
        _maybe("dt_bias", None, "Added to g, {dims}, with safe_gate; 0 if absent.", _FLOAT, "q"),
        _maybe(
            "state_indices",
            "N",
            "Each sequence's row of the pool, (N), int32, all different. One outside [0, P) starts from 0 and is "
            "written nowhere.",
            data_type.INT32,
        ),
    )
}

_ATTRIBUTES = {
    attribute.name: attribute
    for attribute in (
        Attribute("scale", kinds.number, "Multiplies O; K**-0.5 if absent."),
        Attribute("output_final_state", kinds.flag, "Whether final_state is an output.", default=False),
        Attribute("use_qk_l2norm", kinds.flag, "Whether rows of q and k are divided by their norm.", default=False),
        Attribute(
            "checkpoint_every_n_tokens",
            kinds.integer,
            "Of each sequence, a state is kept after every so many tokens short of its end; 0 keeps none.",
            default=0,
        ),
        Attribute("use_beta_sigmoid", kinds.flag, "Whether beta holds logits.", default=False),
        Attribute("allow_neg_eigval", kinds.flag, "Whether the sigmoid of beta's logits is doubled.", default=False),
        Attribute(
            "beta_guard", kinds.flag, "Whether what is erased may not grow a state; no engine serves it.", default=False
        ),
        Attribute("safe_gate", kinds.flag, "Whether g holds raw logits.", default=False),
        Attribute(
            "gate_domain",
            kinds.choice("LOG", "LINEAR"),
            "LOG: g is a logarithm. LINEAR: g is the factor itself, in (0, 1], floored at 1e-10.",
            default="LOG",
        ),
        Attribute(
            "gate_lower_bound", kinds.number, "The least LOG gate that safe_gate makes.", default=GATE_LOWER_BOUND
        ),
        Attribute(
            "batch_invariant", kinds.flag, "A sequence gives the same bits whatever else is packed.", default=False
        ),
        Attribute(
            "overwrite_initial_state",
            kinds.flag,
            "Whether final_state is initial_state, pool or not, with the final states written over its rows. A "
            "backward's initial_state is the one from before.",
            default=False,
        ),
    )
}


def _checkpoints(node: Node, symbols: Symbols) -> Layout:
    rows = symbols["T"] // node.params["checkpoint_every_n_tokens"]
    dim = (rows, *dims_of("HO V K", symbols))
    return dim, row_major(dim)


def _final_state(node: Node, symbols: Symbols) -> Layout:
    rows = "P" if node.params["overwrite_initial_state"] and "state_indices" in node.inputs else "N"
    return dense(f"{rows} HO V K")(node, symbols)


def _flagged(name: str) -> Callable[[Mapping[str, Any], Mapping[str, Tensor]], bool]:
    def when(params: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> bool:
        return bool(params[name])

    return when


def _given(port: str) -> Callable[[Mapping[str, Any], Mapping[str, Tensor]], bool]:
    def when(params: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> bool:
        return port in inputs

    return when


def _gradient(name: str, port: str, optional: bool = False) -> Output:
    doc = f"Gradient of {port}, in its type, dims and layout."
    return Output(name, doc, same_as(port), _given(port) if optional else None, like=port)


def _heads(node: Node, symbols: Symbols) -> None:
    heads = {name: symbols[name] for name in ("H", "HK", "HV")}
    gates, most = symbols["HO"], max(symbols["H"], symbols["HV"])
    if gates != most or any(gates % each for each in heads.values()):
        came = f"has {gates} heads, where q, k, v have {', '.join(map(str, heads.values()))}"
        refuse(node, "g", came, "the larger of q's and v's heads, and a multiple of q's, k's and v's")


def _sequences(node: Node, symbols: Symbols) -> None:
    if symbols["N"] < 0:
        refuse(node, "cu_seqlens", "has dim (0,)", "(N+1), at least one element")
    if symbols["N"] and symbols.get("P") == 0:
        refuse(node, "initial_state", f"has dim {node.inputs['initial_state'].dim}", "a pool (P, HO, V, K) has a row")


def _gate(node: Node, symbols: Symbols) -> None:
    params = node.params
    if params["safe_gate"] and params["gate_domain"] == "LINEAR":
        refuse(node, "safe_gate", "came with gate_domain LINEAR", "raw logits make a LOG gate")
    given = [port for port in ("a_log", "dt_bias") if port in node.inputs]
    if given and not params["safe_gate"]:
        refuse(node, given[0], "came without safe_gate", "it belongs to the gate's raw logits, safe_gate=True")
    bound = params.get("gate_lower_bound", GATE_LOWER_BOUND)
    if not bound < 0:
        refuse(node, "gate_lower_bound", f"is {bound}", "below 0")


def _checkpoint_interval(node: Node, symbols: Symbols) -> None:
    every = node.params["checkpoint_every_n_tokens"]
    if not 0 <= every <= LONGEST_INTERVAL:
        refuse(node, "checkpoint_every_n_tokens", f"is {every}", f"at least 0 and at most {LONGEST_INTERVAL}")
    if "state_checkpoints" not in node.inputs:
        return
    came, wanted = node.inputs["state_checkpoints"].dim, _checkpoints(node, symbols)[0] if every else None
    if came != wanted:
        rule = f"({_CHECKPOINTS}, HO, V, K) = {wanted}" if every else "checkpoint_every_n_tokens is at least 1"
        refuse(node, "state_checkpoints", f"has dim {came}", rule)


def _states(node: Node, symbols: Symbols) -> None:
    if "initial_state" in node.inputs:
        if node.params["overwrite_initial_state"] and not node.params.get("output_final_state", True):
            refuse(node, "overwrite_initial_state", "came without output_final_state", "what is written is an output")
        return
    for name in ("state_indices", "overwrite_initial_state"):
        if name in node.inputs or node.params.get(name):
            refuse(node, name, "came without initial_state", "it says where initial states are")


_RULES = (at_least_one("H", "HK", "HV", "K", "V"), _heads, _sequences, _gate, _checkpoint_interval, _states)


_FORWARD_ONLY = {"state_indices", "output_final_state"}
_BACKWARD_ONLY = {"dO", "state_checkpoints", "d_final_state"}
_FORWARD_OUTPUTS = (
    Output("O", "(T, HO, V), q's type.", dense("T HO V"), like="q"),
    Output(
        "final_state",
        "S behind each sequence's last token, (N, HO, V, K), or the pool with these rows replaced. "
        "initial_state's type, float32 without one.",
        _final_state,
        _flagged("output_final_state"),
        _FLOAT,
        like="initial_state",
        over=("overwrite_initial_state", "initial_state"),
    ),
    Output(
        "state_checkpoints",
        f"({_CHECKPOINTS}, HO, V, K), q's type, in the order of the sequences; 0 behind the last one.",
        _checkpoints,
        _flagged("checkpoint_every_n_tokens"),
        like="q",
    ),
)
PER_TOKEN = {"q": "dQ", "k": "dK", "v": "dV", "g": "dG", "beta": "dBeta", "w": "dW"}
PER_HEAD = {"a_log": "d_a_log", "dt_bias": "d_dt_bias"}
"""Input port -> its gradient: of ports whose rows are tokens, and of those whose rows are heads of gates."""
GRADIENTS = {**PER_TOKEN, "initial_state": "d_initial_state", **PER_HEAD}


def _derivative(d: Transposed) -> Mapping[str, Term | None]:
    """By the backward: of O and of final_state. Kept states have no gradient."""
    if "state_indices" in d.node.inputs or d.node.params["overwrite_initial_state"]:
        d.refuse("its states are rows of a pool, or written over")
    ports = {"dO": d.full("O").typed(d.node.outputs["O"].data_type)}
    if d.cotangent("final_state") is not None:
        ports["d_final_state"] = d.full("final_state").typed(d.node.outputs["final_state"].data_type)
    made = d.backward_node(f"{d.node.operation.name}_bwd", ports, ("output_final_state",))
    return {port: made[GRADIENTS[port]] for port in d.wanted if port in GRADIENTS}


def _pair(
    name: str, summary: str, beta: str, shapes: Mapping[str, str], absent: frozenset[str]
) -> tuple[Operation, Operation]:
    """The forward and the backward of a rule.

    Args:
      beta: what it is.
      shapes: of the ports whose dims depend on the rule.
      absent: ports and attributes that it lacks.
    """

    def port(each: Input) -> Input:
        if each.name not in shapes:
            return each
        dims = f"({', '.join(shapes[each.name].split())})"
        return each._replace(shape=shapes[each.name], doc=each.doc.format(dims=dims, what=beta))

    def operation(
        suffix: str,
        summary: str,
        without: set[str],
        outputs: tuple[Output, ...],
        derivative: Derivative | None = None,
    ) -> Operation:
        left_out = absent | without
        return Operation(
            name=f"{name}{suffix}",
            type=f"{name}{suffix}".upper(),
            summary=summary,
            inputs=tuple(port(each) for key, each in _PORTS.items() if key not in left_out),
            outputs=outputs,
            attributes=tuple(each for key, each in _ATTRIBUTES.items() if key not in left_out),
            rules=_RULES,
            python_only=True,
            derivative=derivative,
        )

    gradients = tuple(
        _gradient(gradient, of, _PORTS[of].optional) for of, gradient in GRADIENTS.items() if of not in absent
    )
    return (
        operation("", summary, _BACKWARD_ONLY, _FORWARD_OUTPUTS, _derivative),
        operation("_bwd", f"The gradients of `{name}`.", _FORWARD_ONLY, gradients),
    )


_WRITTEN = "How much of each token is written"

GDN, GDN_BWD = _pair(
    "gdn",
    "Gated DeltaNet: S <- exp(g) S; S <- S + beta (v - S k) k^T; O = scale S q, token by token, S (V, K) of each head.",
    _WRITTEN,
    {"g": "T HO", "beta": "T HO", "dt_bias": "HO"},
    absent=frozenset({"w", "beta_guard", "gate_lower_bound"}),
)
KDA, KDA_BWD = _pair(
    "kda",
    "Kimi Delta Attention: S <- S diag(exp(g)); S <- S + beta (v - S k) k^T; O = scale S q, token by token, S (V, K) "
    "of each head.",
    _WRITTEN,
    {"g": "T HO K", "beta": "T HO", "dt_bias": "HO K"},
    absent=frozenset({"w", "beta_guard"}),
)
GDN2, GDN2_BWD = _pair(
    "gdn2",
    "Gated DeltaNet 2: S <- S diag(exp(g)); S <- S + (w v - S (beta k)) k^T; O = scale S q, token by token, S (V, K) "
    "of each head.",
    "How much of each key is erased",
    {"g": "T HO K", "beta": "T HO K", "w": "T HO V", "dt_bias": "HO K"},
    absent=frozenset(),
)

LINEAR_ATTENTION = (GDN, GDN_BWD, KDA, KDA_BWD, GDN2, GDN2_BWD)
