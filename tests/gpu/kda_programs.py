"""The Kimi Delta Attention and Gated DeltaNet 2 programs of the GPU tests.

Programs stay few, as their images take long to compile: a form is tested with many packings, which are data, and
forms of one size share images with the calls of `cudnn_jax.kda` and `gdn2` over batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np

import cudnn_jax
from cudnn_jax._sites import sites
from cudnn_jax._target import ahead_of_time
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import Target
from gpu.linear_programs import all_of
from support.gdn_cases import BackwardCase, Case
from support.linear_attention import GATES, Options, Sizes

OPERATIONS = ("kda", "gdn2")
NORMAL = Options(use_qk_l2norm=True)
SAFE = Options(use_qk_l2norm=True, use_beta_sigmoid=True, allow_neg_eigval=True, safe_gate=True)
LINEAR = Options(use_beta_sigmoid=True, gate_domain="linear")
PLAIN = Sizes((117,) * 4, key_dim=128, value_dim=128)

FIRST = {operation: Case(PLAIN, NORMAL, operation=operation) for operation in OPERATIONS}
CHUNKED = [
    *FIRST.values(),
    Case(Sizes((109,) * 4, key_dim=128, value_dim=128), NORMAL, operation="gdn2", gates="bfloat16"),
    Case(
        Sizes((131, 130, 130), (2, 1, 4), key_dim=64, value_dim=64),
        SAFE,
        operation="kda",
        dtype="float16",
        gates="float16",
        cu="int64",
    ),
    Case(
        Sizes((100,) * 5, (4, 2, 2), key_dim=96, value_dim=160),
        Options(scale=0.1, checkpoint_every_n_tokens=64),
        operation="gdn2",
        dtype="float16",
        without=("initial_state",),
    ),
    Case(
        Sizes((64,) * 6, (4, 2, 2), key_dim=48, value_dim=256),
        LINEAR,
        operation="kda",
        gates="bfloat16",
        state="bfloat16",
        pool=9,
        overwrite=True,
    ),
    Case(
        Sizes((150, 150), (2, 1, 4), key_dim=64, value_dim=48),
        Options(use_qk_l2norm=True, safe_gate=True, gate_lower_bound=-50.0),
        operation="gdn2",
        state="bfloat16",
        without=("a_log",),
    ),
    Case(
        Sizes((77,) * 3, (1, 1, 1), key_dim=16, value_dim=16),
        Options(safe_gate=True, gate_lower_bound=-30.0, checkpoint_every_n_tokens=128),
        operation="kda",
        dtype="float16",
        without=("dt_bias",),
    ),
    Case(
        Sizes((120,) * 4, (1, 2, 4), key_dim=112, value_dim=64),
        Options(use_beta_sigmoid=True, allow_neg_eigval=True, safe_gate=True),
        operation="gdn2",
        gates="bfloat16",
        cu="int64",
        pool=7,
    ),
]
"""Forms of the engines that work chunk by chunk, each in both directions."""
SHORT = [
    Case(Sizes((4,) * 6, key_dim=128, value_dim=128), NORMAL, operation="kda", pool=9, overwrite=True),
    Case(Sizes((4,) * 6, key_dim=128, value_dim=128), NORMAL, operation="gdn2"),
    Case(
        Sizes((8, 8, 3), (2, 1, 4), key_dim=64, value_dim=96),
        SAFE,
        operation="kda",
        dtype="float16",
        gates="float16",
        state="bfloat16",
        cu="int64",
    ),
    Case(Sizes((1,) * 5, (4, 2, 2), key_dim=256, value_dim=48), LINEAR, operation="kda", gates="bfloat16", pool=8),
    Case(
        Sizes((5,) * 3, (1, 2, 4), key_dim=208, value_dim=16),
        Options(use_qk_l2norm=True, safe_gate=True, gate_lower_bound=-50.0),
        operation="gdn2",
        dtype="float32",
        without=("a_log",),
    ),
    Case(
        Sizes((2,) * 7, (1, 1, 1), key_dim=16, value_dim=256),
        Options(scale=0.5),
        operation="gdn2",
        dtype="float32",
        without=("initial_state",),
    ),
]
"""Forms of the engines that work token by token."""
_KINDS = ("mild", "steep", "correlated", "unwritten", "zero_keys")
_KINDS_OF_GATES = ("strong", "reset")


def kinds(form: Case) -> tuple[str, ...]:
    """Inputs of a form: what gates are is drawn only where they are not safe."""
    return _KINDS if form.options.safe_gate else _KINDS + _KINDS_OF_GATES


def packed(form: Case, kind: str, rng: np.random.Generator) -> Case:
    """The form with sequences of other lengths in as many tokens, some of them empty, some tokens in none."""
    total, count = form.sizes.total, len(form.sizes.lengths)
    ends = rng.integers(0, total + 1, count)
    for at in range(1, count):
        if rng.random() < 0.2:
            ends[at] = ends[at - 1]
    ends.sort()
    if rng.random() < 0.5:
        ends[-1] = total
    lengths = tuple(map(int, np.diff(ends, prepend=0)))
    return replace(form, kind=kind, sizes=replace(form.sizes, lengths=lengths, tail=total - int(ends[-1])))


def engine(case: Case) -> str:
    return f"cutile_{case.operation}"


def backward_of(form: Case) -> BackwardCase:
    """The form's backward; pools and checkpoints have none."""
    made = {field.name: getattr(form, field.name) for field in fields(form)}
    options = replace(form.options, checkpoint_every_n_tokens=0)
    return BackwardCase(**made | {"options": options, "pool": 0, "overwrite": False})


_GDN = replace(FIRST["kda"], operation="gdn")
COLLAPSED = {"forward": _GDN, "backward": backward_of(_GDN)}
"""The first forms without channels in their gates."""


# ---- Calls over batches -----------------------------------------------------------------------------------

BATCH = len(PLAIN.lengths)


def both(operation: str) -> Callable[..., Any]:
    """Batched operands, the initial state and cotangents -> o, the final state, and the operands' gradients."""
    call = getattr(cudnn_jax, operation)

    def run(given: dict[str, Any], d_o: Any, d_final: Any) -> Any:
        def forward(given: dict[str, Any]) -> Any:
            options = {"use_qk_l2norm": True, "output_final_state": True, "implementation": f"cutile_{operation}"}
            return call(**given, **options)

        made, pull = jax.vjp(forward, given)
        return made, pull((d_o, d_final))[0]

    return run


def step(operation: str) -> Callable[..., Any]:
    """A token's operands by name and the states -> o and the states."""
    one = getattr(cudnn_jax, f"{operation}_step")
    return lambda rows, state: one(
        **rows, state=state, use_qk_l2norm=True, implementation=f"cutile_{operation}_recurrent"
    )


def tokens(operation: str, *lead: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Operands of the first forms with tokens along the axes `lead`."""
    io = dict.fromkeys(("q", "k", "v"), "bfloat16")
    channels = {"q": "K", "k": "K", "v": "V", **GATES[operation]}
    widths = {"": (), "K": (PLAIN.key_dim,), "V": (PLAIN.value_dim,)}
    return {
        name: jax.ShapeDtypeStruct((*lead, PLAIN.gates, *widths[axis]), io.get(name, "float32"))
        for name, axis in channels.items()
    }


def described(operation: str) -> tuple[Any, ...]:
    """What `both` takes."""
    lead = (BATCH, PLAIN.lengths[0])
    given = tokens(operation, *lead)
    states = jax.ShapeDtypeStruct(PLAIN.states, "float32")
    return given | {"initial_state": states}, given["v"], states


def described_step(operation: str) -> tuple[Any, ...]:
    """What `step` takes."""
    return tokens(operation, BATCH), jax.ShapeDtypeStruct(PLAIN.states, "float32")


def _called(target: Target) -> Iterator[tuple[pygraph, str]]:
    for operation in OPERATIONS:
        calls = ((both(operation), described(operation)), (step(operation), described_step(operation)))
        for fn, arguments in calls:
            with ahead_of_time(target):
                found = sites(fn, *arguments)
            yield from ((site.graph(), site.config.implementation) for site in found)


def programs(target: Target) -> Iterator[tuple[pygraph, str]]:
    """Every graph with every plan that a test asks for by name."""
    forms = [*CHUNKED, *map(backward_of, CHUNKED), *COLLAPSED.values()]
    chunked = (all_of([case], engine(case)) for case in forms)
    short = (all_of([case], f"{engine(case)}_recurrent") for case in SHORT)
    return itertools.chain(*chunked, *short, _called(target))
