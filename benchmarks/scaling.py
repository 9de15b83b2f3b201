"""`python -m benchmarks scaling`: the training step of `examples/train_lm.py` on one device and on all of this process.

Weak scaling: each device has the batch of the example. The two are timed in turns; the ratio is all devices' tokens per
second over as many times one device's. Before that the batch of all devices is trained on by one device and by all,
from the same parameters: the losses of each step must agree within rounding.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import cudnn_jax
from benchmarks.report import write_json
from cudnn_jax._measure import half_iqr
from cudnn_jax._sites import sites
from cudnn_jax._target import ahead_of_time
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import Target

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_lm.py"
TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}
"""Relative, of a loss: steps of training carry differences of rounding on."""
AHEAD = (1, 2)
"""Counts of devices that programs are built for ahead of time."""


Options = dict[str, Any]
"""For XLA's compiler."""
QUICK: Options = {"xla_backend_optimization_level": 0}


SMALL = {"batch": 2, "context": 8, "features": 16, "layers": 1, "attention_every": 1, "heads": 2}
"""The example's configuration of a quick run: attention alone."""


@cache
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_lm", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["train_lm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batches(config: Any, text: np.ndarray, count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, text.size - config.context, (count, config.batch))
    return [example().windows(text, each, config.context) for each in starts]


class Run:
    """A trainer, its compiled step, and batches that lie on its devices."""

    def __init__(self, config: Any, devices: int, text: np.ndarray, steps: int, seed: int, options: Options):
        self.trainer = example().Trainer(config, steps, None, seed, devices)
        self.batches = [jax.device_put(each, self.trainer.rows) for each in batches(config, text, steps, seed)]
        arguments = self.trainer.params, self.trainer.opt_state, self.batches[0]
        self.step = self.trainer.train_step.lower(*arguments).compile(options)
        self.tokens = steps * config.batch * config.context

    def losses(self) -> np.ndarray:
        """The loss of each step, from the first parameters on."""
        params, state, found = self.trainer.params, self.trainer.opt_state, []
        for batch in self.batches:
            params, state, loss = self.step(params, state, batch)
            found.append(loss)
        return np.asarray([float(each) for each in found])

    def tokens_per_second(self) -> float:
        began = time.perf_counter()
        self.losses()
        return self.tokens / (time.perf_counter() - began)

    def engines(self) -> dict[str, str]:
        trainer = self.trainer
        told = cudnn_jax.explain(trainer.train_step, trainer.params, trainer.opt_state, self.batches[0])
        return dict(told.engines())


def measure(config: Any, devices: int, steps: int, rounds: int, seed: int, options: Options) -> dict[str, Any]:
    text, _ = example().read_corpus()
    wide = dataclasses.replace(config, batch=devices * config.batch)
    alone, whole, spread = (
        Run(sized, count, text, steps, seed, options) for sized, count in ((config, 1), (wide, 1), (wide, devices))
    )
    curves = {"one device": whole.losses(), "all devices": spread.losses()}
    difference = float(np.max(np.abs(curves["all devices"] / curves["one device"] - 1)))
    alone.losses()  # loads
    rates = np.asarray([[run.tokens_per_second() for run in (alone, spread)] for _ in range(rounds)])
    ratios = rates[:, 1] / (devices * rates[:, 0])
    return {
        "devices": devices,
        "seed": seed,
        "steps": steps,
        "tokens_per_device_and_step": config.batch * config.context,
        "dtype": jnp.dtype(config.dtype).name,
        "engines": spread.engines(),
        "tokens_per_second": {
            name: {"median": float(np.median(of)), "spread": half_iqr(of)}
            for name, of in zip(curves, rates.T, strict=True)
        },
        "ratio": float(np.median(ratios)),
        "ratio_spread": half_iqr(ratios),
        "losses": {name: losses.tolist() for name, losses in curves.items()},
        "loss_difference": difference,
        "loss_tolerance": TOLERANCE[jnp.dtype(config.dtype).name],
    }


def linear_graphs(target: Target, function: Any, *args: Any) -> Iterator[tuple[pygraph, None]]:
    """The linear attention of a jitted function, which a machine without its compiler is to be served."""
    with ahead_of_time(target):
        found = sites(function, *args)
    yield from ((site.graph(), None) for site in found if site.operation.name.startswith(("gdn", "kda")))


def programs(target: Target) -> Iterator[tuple[pygraph, None]]:
    """Those of the step on a GPU."""
    config = example().Config.for_backend("gpu")
    for count in AHEAD:
        sized = dataclasses.replace(config, batch=count * config.batch)
        trainer = example().Trainer(sized, 1, None, 0)
        batch = jax.ShapeDtypeStruct((sized.batch, sized.context + 1), jnp.int32)
        yield from linear_graphs(target, trainer.train_step, trainer.params, trainer.opt_state, batch)


def main(argv: list[str]) -> int:
    """The exit status: 1 if the losses differ by more than rounding."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scaling", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="attention alone, tiny, on two devices: that it runs")
    parser.add_argument("--steps", type=int, default=20, help="of a round, and of the loss curve (default 20)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the JSON (default benchmarks/results/<device>)")
    args = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 200)
    config, devices = example().Config.for_backend(), jax.local_device_count()
    if args.quick:
        config, devices, args.steps, args.rounds = dataclasses.replace(config, **SMALL), min(devices, 2), 2, 2
    if devices < 2:
        console.print("needs 2 devices or more, here is 1")
        return 2
    found = measure(config, devices, args.steps, args.rounds, args.seed, QUICK if args.quick else {})
    for name, of in found["tokens_per_second"].items():
        console.print(f"{name}: {of['median']:,.0f} ±{of['spread']:,.0f} tokens/s", highlight=False)
    console.print(f"weak scaling over {devices} devices: {found['ratio']:.3f} ±{found['ratio_spread']:.3f} of linear")
    console.print(f"losses differ by {found['loss_difference']:.2g}, at most {found['loss_tolerance']:g} is rounding")
    console.print(", ".join(f"{operation} by {engine}" for operation, engine in found["engines"].items()))
    console.print(f"written to {write_json('scaling', found, args.out)}", highlight=False)
    return int(not found["loss_difference"] <= found["loss_tolerance"])
