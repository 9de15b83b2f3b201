"""The benchmark of the example trains each kind of linear attention, writes its curves, and judges its last loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from benchmarks import train_lm


class Trainer:
    """As the example's, which takes long to compile: attention over bytes, whose loss is its scale."""

    def __init__(self, config: Any, steps: int, implementation: str | None, seed: int):
        self.config, self.params, self.opt_state = config, jnp.float32(0.5), jnp.int32(0)

        def loss(scale: jax.Array, batch: jax.Array) -> jax.Array:
            x = jnp.broadcast_to(scale, (*batch.shape, 1, 8))
            return cudnn_jax.sdpa(x, x, x, is_causal=True).mean()

        def step(scale: jax.Array, count: jax.Array, batch: jax.Array) -> tuple[jax.Array, ...]:
            return scale / 2, count + 1, loss(scale, batch)

        self.loss, self.train_step = jax.jit(loss), jax.jit(step)


def test_a_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = train_lm.example()
    monkeypatch.setattr(example, "Trainer", Trainer)
    text = np.arange(4096, dtype=np.uint8)
    monkeypatch.setattr(example, "read_corpus", lambda: (text, text))
    arguments = ["--quick", "--out", str(tmp_path)]
    assert train_lm.main(arguments) == 0
    (path,) = tmp_path.iterdir()
    runs = json.loads(path.read_text())["runs"]
    assert list(runs) == ["gdn", "kda"]
    for run in runs.values():
        assert run["steps"] == 2 and run["engines"] == {"sdpa_fwd": "xla"}
        assert [loss for _, loss in run["training"]] == pytest.approx([0.5, 0.25])
        assert run["validation_loss"] == pytest.approx(0.125) and run["byte_frequencies"] > 5

    monkeypatch.setattr(example, "frequency_loss", lambda *_: 0.1)
    assert train_lm.main([*arguments, "--layers", "kda"]) == 1
