"""The cuTile engines of Kimi Delta Attention and Gated DeltaNet 2 on a GPU, both directions and token by token: fresh
packings of every form against float64, with every setting; outputs and workspace are filled with NaN."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpu import kda_programs as programs
from gpu.linear_programs import implementations
from gpu.poison import poisoned_outputs
from gpu.running import check_twice, served
from support import linear_attention as oracle
from support.gdn_cases import GRADIENT_TOLERANCES, TOLERANCES, Case, by_name
from support.linear_collapse import collapsed, of_gates
from support.linear_graphs import GRADIENTS


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with poisoned_outputs(monkeypatch):
        yield


COTANGENTS = ("dO", "d_final_state")


def tolerance(name: str) -> float:
    """Of a result in bfloat16."""
    return (GRADIENT_TOLERANCES if name in GRADIENTS else TOLERANCES)["bfloat16"]


FORMS = {
    "forward": programs.CHUNKED,
    "backward": [programs.backward_of(form) for form in programs.CHUNKED],
    "recurrent": programs.SHORT,
}
CASES = [
    pytest.param(direction, form, kind, id=f"{direction}: {replace(form, kind=kind)}")
    for direction, forms in FORMS.items()
    for form in forms
    for kind in programs.kinds(form)
]


@pytest.mark.parametrize(("direction", "form", "kind"), CASES)
def test_every_setting_is_right_and_repeats_its_bits(direction: str, form: Case, kind: str, rng) -> None:
    case = programs.packed(form, kind, rng)
    print(case)
    given = case.draw(rng)
    want = case.expected(given)
    suffix = "_recurrent" if direction == "recurrent" else ""
    names = implementations(case, programs.engine(case) + suffix)
    assert names
    for name in names:
        check_twice(case, given, name, want)


def test_gates_without_channels_make_gdn_of_kda_and_kda_of_gdn2(rng: np.random.Generator) -> None:
    cases = programs.COLLAPSED
    given = cases["backward"].draw(rng)
    made = {}
    for operation, each in collapsed(given).items():
        results = {}
        for direction, case in cases.items():
            case = replace(case, operation=operation)
            operands = {name: x for name, x in each.items() if direction == "backward" or name not in COTANGENTS}
            name = implementations(case, programs.engine(case))[0]
            got = check_twice(case, operands, name, case.expected(operands))
            results |= by_name(case.graph(operands), got)
        made[operation] = results | of_gates(results, given["g"].shape)
    for finer, coarser in (("gdn2", "kda"), ("kda", "gdn")):
        for name, want in made[coarser].items():
            if name != "dW":
                assert oracle.error(made[finer][name], want) <= tolerance(name), (finer, name)


@pytest.mark.parametrize("operation", programs.OPERATIONS)
def test_batches_are_packed_sequences(operation: str, rng: np.random.Generator) -> None:
    case = programs.backward_of(programs.FIRST[operation])
    given = case.draw(rng)
    operands = {name: x for name, x in given.items() if name not in COTANGENTS}
    want = case.expected(given) | programs.FIRST[operation].expected(operands)
    described, d_o, _ = programs.described(operation)
    batched = {name: jnp.asarray(given[name]).reshape(like.shape) for name, like in described.items()}
    cotangents = jnp.asarray(given["dO"]).reshape(d_o.shape), jnp.asarray(given["d_final_state"])
    gradient_of = {name: gradient for gradient, name in GRADIENTS.items()}
    (out, final), gradients = served(jax.jit(programs.both(operation)), batched, *cotangents)
    made = {"O": out, "final_state": final} | {gradient_of[name]: x for name, x in gradients.items()}
    assert set(made) == set(want) - {"state_checkpoints"}
    for name, x in made.items():
        assert oracle.error(np.asarray(x).reshape(want[name].shape), want[name]) <= tolerance(name), name


@pytest.mark.parametrize("operation", programs.OPERATIONS)
def test_steps_are_the_sequence(operation: str, rng: np.random.Generator) -> None:
    form = programs.FIRST[operation]
    count = 3
    case = replace(form, sizes=replace(form.sizes, lengths=(count,) * programs.BATCH))
    given = case.draw(rng)
    want = case.expected(given)
    rows, _ = programs.described_step(operation)
    by_token = {name: given[name].reshape(programs.BATCH, count, *like.shape[1:]) for name, like in rows.items()}
    step, state, outs = jax.jit(programs.step(operation), donate_argnums=1), jnp.asarray(given["initial_state"]), []
    for t in range(count):
        out, state = served(step, {name: x[:, t] for name, x in by_token.items()}, state)
        outs.append(out)
    assert oracle.error(np.stack(outs, 1).reshape(want["O"].shape), want["O"]) <= TOLERANCES["bfloat16"]
    assert oracle.error(state, want["final_state"]) <= TOLERANCES["float32"]
