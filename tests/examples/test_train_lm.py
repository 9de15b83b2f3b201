"""The example, small: it learns, it says what ran, and it fails when it has not learnt."""

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.attention.harness import QUICK

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_lm.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_lm", EXAMPLE)
    module = sys.modules["train_lm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(example, monkeypatch):
    config = dataclasses.replace(
        example.Config.for_backend(), batch=8, context=32, features=32, layers=2, attention_every=2, heads=2
    )
    monkeypatch.setattr(example.Config, "for_backend", classmethod(lambda cls: config))
    return config


def nats(text, name):
    return float(re.search(rf"^{name}:\s+([\d.]+) nats/byte", text, re.MULTILINE)[1])


def test_it_learns_and_says_which_engine_ran(example, small, tmp_path, capsys):
    assert example.main(["--steps", "80", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    loss, baseline = nats(text, "validation loss"), nats(text, "byte frequencies alone")
    assert 1.0 < loss < baseline < np.log(256)
    assert "gdn_fwd by xla, sdpa_fwd by xla, sdpa_bwd by xla, gdn_bwd by xla" in text
    assert len(re.findall(r"^step \d+/80 .* tokens/s$", text, re.MULTILINE)) == 10
    assert "\ndef " in text
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_kimi_delta_attention_learns(example, small):
    config = dataclasses.replace(small, layers=1, linear=example.arguments(["--layers", "kda"]).layers)
    trainer = example.Trainer(config, 60, None, 0)
    text, held_out = example.read_corpus()
    losses = []
    for starts in np.random.default_rng(0).integers(0, text.size - 32, (60, 8)):
        batch = example.windows(text, starts, 32)
        trainer.params, trainer.opt_state, loss = trainer.train_step(trainer.params, trainer.opt_state, batch)
        losses.append(float(loss))
    assert 1.0 < np.mean(losses[-10:]) < example.frequency_loss(text, held_out)


def test_stopped_before_it_learnt_it_fails(example, small, tmp_path, capsys):
    assert example.main(["--steps", "100000", "--seconds", "0", "--out", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert re.search(r"^1 steps, 256 tokens in ", text, re.MULTILINE)
    assert nats(text, "validation loss") > nats(text, "byte frequencies alone")
    assert text.rstrip().endswith("the loss is not below what byte frequencies alone reach")


def losses(trainer, step, batches):
    state, found = (trainer.params, trainer.opt_state), []
    for batch in batches:
        *state, loss = step(*state, jax.device_put(batch, trainer.rows))
        found.append(float(loss))
    return found


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices; tests/conftest.py asks XLA for them on a CPU")
def test_one_seed_gives_one_result_on_one_device_and_on_eight(example, small):
    batches = np.random.default_rng(3).integers(0, 256, (3, 8, 33), np.int32)
    found = {}
    for devices in (1, 8):
        trainers = [example.Trainer(small, 10, None, seed, devices) for seed in (0, 0, 1)]
        first = trainers[0]
        step = first.train_step.lower(first.params, first.opt_state, batches[0]).compile(QUICK)
        found[devices], again, other = (losses(trainer, step, batches) for trainer in trainers)
        assert found[devices] == again
        assert found[devices][0] != other[0]
    assert found[1][2] < found[1][0]
    np.testing.assert_allclose(found[8], found[1], rtol=1e-5)


def test_no_position_sees_later_bytes(example, small):
    trainer = example.Trainer(small, 10, None, 0)
    model = trainer._model(trainer.params)
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 256, (1, 32)))
    changed = tokens.at[0, 20].add(1)
    difference = jnp.abs(model(tokens) - model(changed)).max(axis=(0, 2))
    assert float(difference[:20].max()) == 0.0
    assert float(difference[20:].min()) > 0.0


def test_corpus_is_split_by_file_and_the_baseline_is_its_cross_entropy(example):
    training, held_out = example.read_corpus()
    assert training.size > 5 * held_out.size > 500_000
    counts = np.bincount(training, minlength=256) + 1
    frequencies = np.bincount(held_out, minlength=256) / held_out.size
    expected = -(frequencies * np.log(counts / counts.sum())).sum()
    assert example.frequency_loss(training, held_out) == pytest.approx(expected, rel=1e-9)


def test_sample_of_more_than_the_context_is_drawn(example, small):
    trainer = example.Trainer(small, 10, None, 0)
    prompt = np.frombuffer(b"def ", np.uint8).astype(np.int32)
    drawn = [np.asarray(trainer.sample(trainer.params, prompt, jax.random.key(k), length=50)) for k in (0, 0, 1)]
    assert drawn[0].shape == (50,) and drawn[0].min() >= 0 and drawn[0].max() < 256
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any()
