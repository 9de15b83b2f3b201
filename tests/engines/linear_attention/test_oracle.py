"""The oracle that linear attention is compared with: its gradients against differences of its values."""

from __future__ import annotations

import numpy as np
import pytest

from support import linear_attention as oracle
from support.linear_attention import Options, Sizes

OPTIONS = [
    Options(),
    Options(use_qk_l2norm=True, use_beta_sigmoid=True, allow_neg_eigval=True, safe_gate=True, scale=0.7),
    Options(use_beta_sigmoid=True, gate_domain="linear"),
]


@pytest.mark.parametrize("operation", oracle.GATES)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "options", "linear"])
def test_gradients_are_differences(options: Options, operation: str, rng: np.random.Generator) -> None:
    sizes = Sizes((70, 0, 3), heads=(1, 2, 2), key_dim=3, value_dim=2, tail=1)
    given = {name: x.astype(np.float64) for name, x in oracle.draw(rng, sizes, options, operation=operation).items()}
    out = oracle.forward(given, options)
    d_o, d_final = rng.standard_normal(out["O"].shape), rng.standard_normal(out["final_state"].shape)

    def value(given: oracle.Arrays) -> float:
        made = oracle.forward(given, options)
        return float(np.sum(made["O"] * d_o) + np.sum(made["final_state"] * d_final))

    gradients = oracle.backward(given, d_o, d_final, options)
    assert set(gradients) == set(given) - {"cu_seqlens"}
    for name, gradient in gradients.items():
        direction, step = rng.standard_normal(gradient.shape), 1e-6
        ahead, back = (value(given | {name: given[name] + sign * step * direction}) for sign in (1, -1))
        assert np.sum(gradient * direction) == pytest.approx((ahead - back) / (2 * step), rel=2e-6, abs=2e-6), name


def test_states_are_kept_short_of_the_end(rng: np.random.Generator) -> None:
    sizes = Sizes((7, 0, 6, 2))
    given = oracle.draw(rng, sizes)
    kept = oracle.forward(given, Options(checkpoint_every_n_tokens=3))["state_checkpoints"]
    first = {name: x[:3] if len(x) == sizes.total else x for name, x in given.items()}
    first |= {"cu_seqlens": np.array([0, 3]), "initial_state": given["initial_state"][:1]}
    assert len(kept) == 2 + 0 + 1 + 0
    np.testing.assert_array_equal(kept[0], oracle.forward(first)["final_state"][0])
