"""Graphs of linear attention for arrays, and what an engine's function makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cudnn_jax.engines.linear_attention.facts import analyze
from cudnn_jax.engines.planning import pygraph
from support.linear_attention import PLAIN, Arrays, Options

GRADIENTS = {
    "dQ": "q",
    "dK": "k",
    "dV": "v",
    "dG": "g",
    "dBeta": "beta",
    "dW": "w",
    "d_initial_state": "initial_state",
    "d_a_log": "a_log",
    "d_dt_bias": "dt_bias",
}


def graph(
    direction: str, given: dict[str, Any], options: Options = PLAIN, operation: str = "gdn", **more: Any
) -> tuple[pygraph, Any]:
    """A graph whose inputs have the arrays' shapes and types, every output asked for; and its named outputs."""
    made = pygraph(io_data_type=given["q"].dtype.name)
    tensors = {name: made.tensor(x.shape, data_type=x.dtype.name, name=name) for name, x in given.items()}
    build = getattr(made, operation if direction == "fwd" else f"{operation}_bwd")
    build(**tensors, **options.attributes(), **more)
    outputs = made.nodes[0].outputs
    for tensor in outputs.values():
        tensor.set_output(True)
    return made, outputs


def run(make: Callable[..., Any], made: pygraph, outputs: Any, given: dict[str, Any], jit: bool = False) -> Arrays:
    """The outputs by name, of the function that `make` makes of a graph's facts.

    Without `jit` it runs op by op: nothing is compiled but small operations, which other graphs share.
    """
    made.freeze()
    arrays = [jnp.asarray(given[tensor.name]) for tensor in made.inputs]
    with jax.disable_jit(not jit):
        fn = jax.jit(make(analyze(made))) if jit else make(analyze(made))
        got = dict(zip(map(id, made.outputs), fn(*arrays), strict=True))
    named = {name: np.asarray(got[id(tensor)]) for name, tensor in outputs.items()}
    for name, tensor in outputs.items():
        assert (named[name].shape, named[name].dtype.name) == (tensor.dim, tensor.data_type.value), name
    return named
