"""`python -m benchmarks train_lm`: `examples/train_lm.py` on one device, with each of its kinds of linear attention.

Writes the losses of training and validation by step, in nats a byte, beside what byte frequencies alone reach, the
tokens a second of the whole run, compiling and validating included, and the engine that ran each operation.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

import cudnn_jax
from benchmarks.report import write_json
from benchmarks.scaling import SMALL, example, linear_graphs
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import Target

LAYERS = ("gdn", "kda")


def programs(target: Target) -> Iterator[tuple[pygraph, None]]:
    """The linear attention of training and validation on a GPU."""
    for linear in LAYERS:
        config = dataclasses.replace(example().Config.for_backend("gpu"), linear=linear)
        trainer = example().Trainer(config, 1, None, 0)
        batch = jax.ShapeDtypeStruct((config.batch, config.context + 1), jnp.int32)
        yield from linear_graphs(target, trainer.train_step, trainer.params, trainer.opt_state, batch)
        yield from linear_graphs(target, trainer.loss, trainer.params, batch)


def measure(config: Any, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    text, held_out = example().read_corpus()
    trainer = example().Trainer(config, args.steps, None, args.seed)
    batch = jax.ShapeDtypeStruct((config.batch, config.context + 1), jnp.int32)
    told = cudnn_jax.explain(trainer.train_step, trainer.params, trainer.opt_state, batch)
    history, loss, steps, seconds = example().train(trainer, text, held_out, args, console)
    return {
        "dtype": jnp.dtype(config.dtype).name,
        "steps": steps,
        "training": history.training,
        "validation": history.validation,
        "validation_loss": loss,
        "byte_frequencies": example().frequency_loss(text, held_out),
        "tokens_per_second": steps * config.batch * config.context / seconds,
        "engines": dict(told.engines()),
    }


def main(argv: list[str]) -> int:
    """The exit status: 1 if a model did not get below what byte frequencies alone reach."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks train_lm", description=__doc__)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=LAYERS, help="linear attention (default: all)")
    parser.add_argument("--quick", action="store_true", help="attention alone, tiny: that it runs")
    parser.add_argument("--steps", type=int, default=900, help="of training (default 900)")
    parser.add_argument("--seconds", type=float, default=140.0, help="of training at most (default 140)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the JSON (default benchmarks/results/<device>)")
    args = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 200)
    found = {}
    for linear in args.layers:
        config = dataclasses.replace(example().Config.for_backend(), linear=linear)
        if args.quick:
            config, args.steps = dataclasses.replace(config, **SMALL), 2
        run = found[linear] = measure(config, args, console)
        engines = ", ".join(f"{operation} by {engine}" for operation, engine in run["engines"].items())
        console.print(
            f"{linear}: {run['validation_loss']:.3f} nats a byte held out after {run['steps']} steps, "
            f"{run['byte_frequencies']:.3f} by byte frequencies; {engines}",
            highlight=False,
        )
    path = write_json("train_lm", {"seed": args.seed, "runs": found}, args.out)
    console.print(f"written to {path}", highlight=False)
    return int(not all(run["validation_loss"] < run["byte_frequencies"] for run in found.values()))
