"""The scaling benchmark trains on one device and on two, writes losses and rates, and judges the losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cudnn_jax
from benchmarks import scaling


class Trainer:
    """As the example's, which takes long to compile: attention over bytes."""

    def __init__(self, config: Any, steps: int, implementation: str | None, seed: int, devices: int = 1):
        mesh = Mesh(jax.devices()[:devices], ("batch",))
        self.rows = NamedSharding(mesh, P("batch"))
        self.params, self.opt_state = jax.device_put((jnp.float32(0.5), jnp.int32(0)), NamedSharding(mesh, P()))

        def loss(scale: jax.Array, batch: jax.Array) -> jax.Array:
            # Batches differ less than a step makes of the loss, and more than rounding.
            rows = scale * (1 + batch / 12800)
            x = jnp.broadcast_to(rows[:, :, None, None], (*batch.shape, 1, 8))
            return (1 - cudnn_jax.sdpa(x, x, x, is_causal=True)).mean() ** 2

        def step(scale: jax.Array, count: jax.Array, batch: jax.Array) -> tuple[jax.Array, ...]:
            value, slope = jax.value_and_grad(loss)(scale, batch)
            return scale - 0.1 * slope, count + 1, value

        self.train_step = jax.jit(step)


def test_a_quick_run_on_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling.example(), "Trainer", Trainer)
    arguments = ["--quick", "--out", str(tmp_path)]
    assert scaling.main(arguments) == 0
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    assert written["devices"] == 2 and written["ratio"] > 0
    assert written["engines"] == {"sdpa_fwd": "xla", "sdpa_bwd": "xla"}
    one, every = (written["losses"][name] for name in ("one device", "all devices"))
    assert len(one) == len(every) == 2 and one[0] > one[1]

    for difference in (2e-3, float("nan")):
        monkeypatch.setattr(scaling, "measure", lambda *_, it=difference: written | {"loss_difference": it})
        assert scaling.main(arguments) == 1
