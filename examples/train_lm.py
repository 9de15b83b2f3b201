"""Trains a small byte-level language model on the Python standard library's own sources.

    python examples/train_lm.py [--layers gdn|kda] [--steps N] [--seconds S] [--out DIR] [--implementation NAME]
        [--seed N] [--devices N]

A hybrid: of four layers three are linear attention, Gated DeltaNet through `cudnn_jax.gdn` or Kimi Delta Attention
through `cudnn_jax.kda`, and one is attention, through `cudnn_jax.sdpa` as the `attention_fn` of Flax NNX's
MultiHeadAttention. The closing lines say which engine ran each operation. Exits with 1 if the validation loss is not
below what the byte frequencies alone reach.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import cudnn_jax
from cudnn_jax.flax import GatedDeltaNet, KimiDeltaAttention, attention_fn

NATS_PER_BIT = math.log(2)
LINEAR_ATTENTION = {"gdn": GatedDeltaNet, "kda": KimiDeltaAttention}
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3"}


@dataclasses.dataclass(frozen=True)
class Config:
    """What differs by platform is numbers only: the program is the same."""

    batch: int
    dtype: jnp.dtype
    context: int = 128
    features: int = 128
    layers: int = 4
    attention_every: int = 4
    heads: int = 4
    linear: str = "gdn"
    learning_rate: float = 3e-3

    @classmethod
    def for_backend(cls, backend: str | None = None) -> Config:
        if (backend or jax.default_backend()) == "gpu":
            return cls(batch=128, dtype=jnp.bfloat16)
        return cls(batch=8, dtype=jnp.float32)


# ---- Text ------------------------------------------------------------------------------------------------


def read_corpus() -> tuple[np.ndarray, np.ndarray]:
    """Training and validation bytes: every tenth file of the sorted list is for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts))
    texts = [path.read_bytes() for path in files]
    validation = b"".join(texts[::10])
    training = b"".join(text for i, text in enumerate(texts) if i % 10)
    return np.frombuffer(training, np.uint8), np.frombuffer(validation, np.uint8)


def frequency_loss(training: np.ndarray, validation: np.ndarray) -> float:
    """Nats per byte on the validation text of a model that knows the training byte frequencies only."""
    counts = np.bincount(training, minlength=256) + 1.0
    return float(-np.log(counts / counts.sum())[validation].mean())


def windows(text: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """Rows of context + 1 bytes: the last `context` are the targets of the first."""
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


# ---- Model -----------------------------------------------------------------------------------------------


def mixer(config: Config, layer: int, implementation: str | None, rngs: nnx.Rngs) -> nnx.Module:
    """What mixes tokens in a layer: attention in every `attention_every`th, linear attention in the others."""
    if (layer + 1) % config.attention_every:
        dim = config.features // config.heads
        return LINEAR_ATTENTION[config.linear](
            config.features,
            num_heads=config.heads,
            head_dim=dim,
            value_head_dim=dim,
            dtype=config.dtype,
            implementation=implementation,
            rngs=rngs,
        )
    return nnx.MultiHeadAttention(
        config.heads,
        config.features,
        dtype=config.dtype,
        use_bias=False,
        decode=False,
        attention_fn=functools.partial(attention_fn, causal=True, implementation=implementation),
        rngs=rngs,
    )


class Block(nnx.Module):
    def __init__(self, config: Config, layer: int, implementation: str | None, rngs: nnx.Rngs):
        width = config.features
        self.norm1 = nnx.RMSNorm(width, dtype=config.dtype, rngs=rngs)
        self.mixer = mixer(config, layer, implementation, rngs)
        self.norm2 = nnx.RMSNorm(width, dtype=config.dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=config.dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=config.dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.mixer(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class ByteModel(nnx.Module):
    def __init__(self, config: Config, implementation: str | None, rngs: nnx.Rngs):
        # In float32, since their gradient is a scatter-add of many tokens to few rows.
        self.bytes = nnx.Embed(256, config.features, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.features, rngs=rngs)
        self.dtype = config.dtype
        self.blocks = nnx.List([Block(config, layer, implementation, rngs) for layer in range(config.layers)])
        self.norm = nnx.RMSNorm(config.features, dtype=config.dtype, rngs=rngs)
        self.logits = nnx.Linear(config.features, 256, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = (self.bytes(tokens) + self.positions(jnp.arange(tokens.shape[-1]))).astype(self.dtype)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x)).astype(jnp.float32)


class Trainer:
    """The jitted functions over (parameters, optimizer state): training, evaluation and sampling."""

    def __init__(self, config: Config, steps: int, implementation: str | None, seed: int, devices: int = 1):
        self.config = config
        mesh = jax.make_mesh((devices,), ("batch",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
        self.rows, everywhere = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())
        self.graphdef, self.params = nnx.split(ByteModel(config, implementation, nnx.Rngs(seed)), nnx.Param)
        warmup = max(1, steps // 20)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, config.learning_rate, warmup, max(steps, warmup + 1), 0.05 * config.learning_rate
        )
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05))
        self.opt_state = self.optimizer.init(self.params)
        self.params, self.opt_state = jax.device_put((self.params, self.opt_state), everywhere)
        self.train_step = jax.jit(self._train_step, in_shardings=(everywhere, everywhere, self.rows))
        self.loss = jax.jit(self._loss, in_shardings=(everywhere, self.rows))
        self.sample = jax.jit(self._sample, static_argnames="length")

    def _model(self, params: nnx.State) -> ByteModel:
        return nnx.merge(self.graphdef, params)

    def _loss(self, params: nnx.State, batch: jax.Array) -> jax.Array:
        logits = self._model(params)(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def _train_step(self, params: nnx.State, opt_state: optax.OptState, batch: jax.Array) -> tuple:
        loss, grads = jax.value_and_grad(self._loss)(params, batch)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def _sample(self, params: nnx.State, prompt: jax.Array, key: jax.Array, length: int) -> jax.Array:
        """Draws `length` bytes, one at a time, each from the last `context` bytes."""
        model, context = self._model(params), self.config.context

        def draw(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple:
            window, filled = carry
            token = jax.random.categorical(key, model(window[None])[0, filled - 1] / 0.7)
            full = filled == context
            window = jnp.where(full, jnp.roll(window, -1), window)
            filled = jnp.where(full, filled, filled + 1)
            return (window.at[filled - 1].set(token), filled), token

        window = jnp.zeros(context, jnp.int32).at[: prompt.size].set(prompt)
        _, tokens = jax.lax.scan(draw, (window, jnp.int32(prompt.size)), jax.random.split(key, length))
        return tokens


# ---- The run ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class History:
    training: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)


class Report:
    """A live bar on a terminal; elsewhere a line for every tenth of the run."""

    def __init__(self, console: Console, steps: int):
        self.console, self.steps, self.printed = console, steps, 0
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=steps, line="compiling")

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        line = f"loss {loss:.3f} nats/byte  {tokens_per_second:,.0f} tokens/s"
        self.bar.update(self.task, completed=step, line=line)
        if not self.console.is_terminal and 10 * step // self.steps > self.printed:
            self.printed = 10 * step // self.steps
            self.console.print(f"step {step}/{self.steps}  {line}")


def train(trainer: Trainer, text: np.ndarray, held_out: np.ndarray, args: argparse.Namespace, console: Console):
    config, history = trainer.config, History()
    rng = np.random.default_rng(args.seed)
    starts = np.linspace(0, held_out.size - config.context - 1, 16 * config.batch).astype(int)
    validation = windows(held_out, starts, config.context).reshape(-1, config.batch, config.context + 1)
    every = max(1, args.steps // 10)

    def validate(step: int, batches: int) -> float:
        losses = [trainer.loss(trainer.params, batch) for batch in validation[:: 16 // batches]]
        history.validation.append((step, float(np.mean(losses))))
        return history.validation[-1][1]

    began = time.perf_counter()
    report = Report(console, args.steps)
    mark_step, mark_time, step = 1, began, 0
    with report.bar:
        while step == 0 or (step < args.steps and time.perf_counter() - began < args.seconds):
            batch = windows(text, rng.integers(0, text.size - config.context, config.batch), config.context)
            trainer.params, trainer.opt_state, loss = trainer.train_step(trainer.params, trainer.opt_state, batch)
            step += 1
            if step == 1:
                jax.block_until_ready(loss)
                mark_time = time.perf_counter()
            if step % 5 == 0 or step in (1, args.steps):
                history.training.append((step, float(loss)))
                now = time.perf_counter()
                rate = (step - mark_step) * config.batch * config.context / max(now - mark_time, 1e-9)
                report.update(step, history.training[-1][1], rate)
            if step % every == 0 and step < args.steps:
                before = time.perf_counter()
                validate(step, 4)
                mark_time += time.perf_counter() - before
    final = validate(step, 16)
    return history, final, step, time.perf_counter() - began


def draw_curve(history: History, baseline: float, path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), dpi=120, layout="constrained")
    axes.plot(*zip(*history.training, strict=True), color="tab:blue", alpha=0.7, lw=1, label="training batch")
    axes.plot(*zip(*history.validation, strict=True), "o-", color="tab:orange", label="validation")
    axes.axhline(baseline, color="tab:red", ls="--", label=f"byte frequencies alone: {baseline:.2f}")
    axes.annotate(
        f"{history.validation[-1][1]:.2f}",
        history.validation[-1],
        xytext=(0, 8),
        textcoords="offset points",
        ha="right",
        color="tab:orange",
    )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    bits = axes.secondary_yaxis("right", functions=(lambda n: n / NATS_PER_BIT, lambda b: b * NATS_PER_BIT))
    bits.set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", choices=LINEAR_ATTENTION, default="gdn", help="linear attention (default gdn)")
    parser.add_argument("--steps", type=int, default=900, help="training steps (default 900)")
    parser.add_argument("--seconds", type=float, default=140.0, help="stop earlier after this long (default 140)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for loss.png (default out)")
    parser.add_argument("--implementation", help="as in cudnn_jax.sdpa; the ranked choice by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, default=1, help="over how many the batch is split (default 1)")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"argument --steps: must be at least 1, got {args.steps}")
    if not 1 <= args.devices <= jax.device_count():
        parser.error(f"argument --devices: must be 1 to {jax.device_count()}, got {args.devices}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    console = Console()
    config = dataclasses.replace(Config.for_backend(), linear=args.layers)
    text, held_out = read_corpus()
    trainer = Trainer(config, args.steps, args.implementation, args.seed, args.devices)
    parameters = sum(x.size for x in jax.tree.leaves(trainer.params))
    device = jax.devices()[0].device_kind + (f" x{args.devices}" if args.devices > 1 else "")
    console.print(
        f"{parameters:,} parameters, {jnp.dtype(config.dtype).name}, on {device}; "
        f"{text.size / 1e6:.1f} MB to train on, {held_out.size / 1e6:.1f} MB held out"
    )
    history, loss, steps, seconds = train(trainer, text, held_out, args, console)
    baseline = frequency_loss(text, held_out)
    picture = args.out / "loss.png"
    draw_curve(history, baseline, picture, f"Byte-level language model, {parameters:,} parameters, {device}")

    prompt = np.frombuffer(b"def ", np.uint8).astype(np.int32)
    sample = trainer.sample(trainer.params, prompt, jax.random.key(args.seed), length=320)
    console.rule("sample")
    console.print(
        "def " + bytes(np.asarray(sample, np.uint8)).decode("utf-8", "replace"), markup=False, highlight=False
    )
    console.rule()

    batch = jax.ShapeDtypeStruct((config.batch, config.context + 1), jnp.int32)
    explanation = cudnn_jax.explain(trainer.train_step, trainer.params, trainer.opt_state, batch)
    console.print(explanation)
    tokens = steps * config.batch * config.context
    console.print(f"{steps} steps, {tokens:,} tokens in {seconds:.0f} s; loss curve in {picture}")
    for name, nats in (("validation loss", loss), ("byte frequencies alone", baseline)):
        console.print(f"{name + ':':24}{nats:.3f} nats/byte = {nats / NATS_PER_BIT:.3f} bits/byte")
    engines = ", ".join(f"{operation} by {name}" for operation, name in explanation.engines().items())
    console.print(f"what ran on {device}: {engines}", soft_wrap=True)
    if not loss < baseline:
        console.print("the loss is not below what byte frequencies alone reach")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
