"""A boolean mask on the cuDNN backend: the graph with a plain bias operand, and the function that makes that bias.

A mask is written binary_select(bias or 0, -inf, mask) in front of the bias port. cuDNN 9.19 declines that pointwise
node, and takes a bias with entries of -inf to mean what the mask means, in both directions: a row without any other
entry gives output 0 and logsumexp -inf. A masked entry has probability 0, so that the gradient of the derived bias is
the gradient of the user's.

In the backward, cuDNN 9.19 makes garbage of a row whose logsumexp is -inf where the bias has a query or key axis of 1.
Such a row's logsumexp is handed on as a large number: exp(logit - 1e30) is 0, and so are its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cudnn_jax.engines.base import Derived
from cudnn_jax.engines.sdpa.facts import SdpaFacts
from cudnn_jax.graph import GraphNotSupportedError, Node, Tensor, data_type, pygraph

if TYPE_CHECKING:
    import jax

_BIAS = -1
"""In the place of a position in `graph.inputs`: the operand that is computed."""


def derive(graph: pygraph, facts: SdpaFacts) -> Derived | None:
    """What to ask cuDNN in place of a graph with a mask or, in the backward, with a bias that broadcasts.

    None for other graphs, and for those with parts or options unknown here.

    Raises:
      GraphNotSupportedError: the bias would be larger than the arrays that it is made of, or have another gradient.
    """
    if facts.unexplained or facts.options:
        return None
    if "mask" not in facts.ports:
        broadcasts = facts.bias_dim is not None and facts.bias_dim[2:] != (facts.q_len, facts.kv_len)
        return _with_guarded_stats(graph, facts) if broadcasts and "stats" in facts.ports else None
    (node,) = [n for n in graph.nodes if n.type in ("SDPA", "SDPA_BACKWARD")]
    selected, mask = node.inputs["bias"], graph.inputs[facts.ports["mask"]]
    bias = graph.inputs[facts.ports["bias"]] if "bias" in facts.ports else None
    if not selected.is_virtual or mask.data_type is not data_type.BOOLEAN:
        return None
    _check(selected.dim, mask, bias, "dBias" in facts.results)
    dtype = facts.dtype if bias is None else bias.data_type
    derived, sources = _with_plain_bias(graph, node, dtype)
    prepare = _prepare(facts.ports, selected.dim, dtype, sources)
    became = f"mask {mask.dim} becomes" if bias is None else f"mask {mask.dim} and bias {bias.dim} become"
    nbytes = math.prod(selected.dim) * dtype.itemsize_bits // 8
    return Derived(derived, prepare, (f"{became} a bias of {nbytes} bytes",))


def _check(combined: Sequence[int], mask: Tensor, bias: Tensor | None, gradient: bool) -> None:
    if gradient and (bias is None or bias.dim != combined):
        raise GraphNotSupportedError(
            f"gradient of bias {bias and bias.dim} under mask {mask.dim}, serves masks that broadcast to the bias"
        )
    if math.prod(combined) > max(math.prod(tensor.dim) for tensor in (mask, bias) if tensor is not None):
        raise GraphNotSupportedError(
            f"mask {mask.dim} and bias {bias and bias.dim} combine to {combined}, serves the shape of one of them"
        )


def _with_plain_bias(graph: pygraph, node: Node, dtype: data_type) -> tuple[pygraph, list[int]]:
    """The graph of `node` alone with a bias operand, and for each of its inputs the position in `graph.inputs`."""
    derived = pygraph(graph.name, graph.io_data_type, graph.intermediate_data_type, graph.compute_data_type)
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = derived.tensor(tensor.dim, tensor.stride, tensor.data_type, tensor.name)
        return copies[id(tensor)]

    keywords: dict[str, Any] = {port: copy(tensor) for port, tensor in node.inputs.items() if port != "bias"}
    keywords["bias"] = derived.tensor(node.inputs["bias"].dim, data_type=dtype, name="bias")
    for output in node.operation.outputs:
        if output.from_caller and output.name in node.outputs:
            keywords[output.name] = copy(node.outputs[output.name])
    # A dropout that is no option drops nothing.
    keywords |= {name: value for name, value in node.params.items() if value is not None and name != "dropout"}
    getattr(derived, node.operation.name)(**keywords, name=node.name, compute_data_type=node.compute_data_type)

    for port, made in derived.nodes[0].outputs.items():
        wanted = node.outputs[port]
        made.set_is_virtual(wanted.is_virtual).set_data_type(wanted.data_type)
        if wanted.layout_is_user:
            made.set_dim(wanted.dim).set_stride(wanted.stride)
    derived.freeze()

    position = {id(copies[id(tensor)]): at for at, tensor in enumerate(graph.inputs) if id(tensor) in copies}
    return derived, [position.get(id(tensor), _BIAS) for tensor in derived.inputs]


def _prepare(
    ports: Mapping[str, int], dim: Sequence[int], dtype: data_type, sources: Sequence[int]
) -> Callable[..., tuple[Any, ...]]:
    def prepare(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        import jax.numpy as jnp

        kept = arrays[ports["bias"]] if "bias" in ports else jnp.zeros((), dtype.value)
        bias = jnp.where(arrays[ports["mask"]], kept, jnp.full((), -jnp.inf, kept.dtype)).reshape(dim)
        given = _guarded(arrays, ports)
        return tuple(bias if at == _BIAS else given[at] for at in sources)

    return prepare


def _with_guarded_stats(graph: pygraph, facts: SdpaFacts) -> Derived:
    return Derived(graph, lambda *arrays: tuple(_guarded(arrays, facts.ports)))


def _guarded(arrays: Sequence[jax.Array], ports: Mapping[str, int]) -> list[jax.Array]:
    """The arrays, the logsumexp of a row with nothing to attend to made large."""
    import jax.numpy as jnp

    given = list(arrays)
    if "stats" in ports:
        stats = given[ports["stats"]]
        given[ports["stats"]] = jnp.where(jnp.isneginf(stats), jnp.float32(1e30), stats)
    return given
