"""`explain`, `autotune` and `build` for a call that is described on the command line, such as

python -m cudnn_jax explain sdpa 4x4096x16x128 --set is_causal=True --gradient --target h200
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

OPERATIONS: dict[str, tuple[str, ...]] = {
    "sdpa": ("query", "key", "value"),
    "gdn": ("q", "k", "v", "g", "beta"),
    "kda": ("q", "k", "v", "g", "beta"),
    "gdn2": ("q", "k", "v", "g", "beta", "w"),
    "rms_norm": ("x", "scale"),
    "layer_norm": ("x", "scale", "bias"),
    "rope": ("x", "angles"),
    "conv": ("image", "weight"),
}
"""Operation -> the arrays whose shapes are given; one that is not given has the shape of the first."""


def shape(text: str) -> tuple[int, ...]:
    """ "4x4096x16x128" as dims."""
    try:
        return tuple(int(extent) for extent in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; the rule: dims such as 4x4096x16x128") from None


def option(text: str) -> tuple[str, Any]:
    """ "is_causal=True" as a keyword; what is no Python value is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}; the rule: NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


ARGUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("operation", {"choices": sorted(OPERATIONS), "help": "the operation that is called"}),
    ("shapes", {"type": shape, "nargs": "+", "metavar": "SHAPE", "help": "dims of the arrays in order: 4x4096x16x128"}),
    ("--dtype", {"default": "bfloat16", "help": "element type of the arrays (default bfloat16)"}),
    ("--set", {"dest": "options", "type": option, "action": "append", "default": [], "metavar": "NAME=VALUE"}),
    ("--gradient", {"action": "store_true", "help": "the gradient by all arrays, rather than the call alone"}),
)


def explain(target: str | None, as_json: bool, **described: Any) -> int:
    """Prints what would run."""
    import cudnn_jax

    def run() -> None:
        fn, arrays = _call(**described)
        with cudnn_jax.aot.target(target) if target else nullcontext():
            _print(cudnn_jax.explain(fn, *arrays), as_json)

    return _guarded(run)


def autotune(quiet: bool, as_json: bool, **described: Any) -> int:
    """Times every plan on this device, keeps the fastest and prints what was found."""
    import cudnn_jax

    def run() -> None:
        fn, arrays = _call(**described)
        _print(cudnn_jax.autotune(fn, *arrays, quiet=quiet), as_json)

    return _guarded(run)


def build(target: str, out: str, **described: Any) -> int:
    """Builds the programs into a folder and prints one line for each."""
    import cudnn_jax
    from cudnn_jax.engines.target import named

    def run() -> None:
        fn, arrays = _call(**described)
        for site in cudnn_jax.aot.build(fn, *arrays, target=target, out=out):
            planned = site.plan(named(target))
            print(
                f"{site.operation.name}: {planned.subject}: {planned.plan.name}, {planned.plan.workspace} B workspace"
            )

    return _guarded(run)


def _print(told: Any, as_json: bool) -> None:
    if as_json:
        print(told.to_json())
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 160).print(told)


def _call(
    operation: str, shapes: Sequence[tuple[int, ...]], dtype: str, options: Sequence[tuple[str, Any]], gradient: bool
) -> tuple[Callable[..., Any], list[Any]]:
    import jax
    import jax.numpy as jnp

    names = OPERATIONS[operation]
    if len(shapes) > len(names):
        raise ValueError(f"{len(shapes)} shapes came; the rule: at most {len(names)}, of {', '.join(names)}")
    whole = [*shapes, *[shapes[0]] * (len(names) - len(shapes))]
    arrays = [jax.ShapeDtypeStruct(dims, jnp.dtype(dtype)) for dims in whole]
    fn = getattr(importlib.import_module(f"cudnn_jax.ops.{operation}"), operation)

    def forward(*given: Any) -> Any:
        return fn(*given, **dict(options))

    def loss(*given: Any) -> Any:
        return sum(leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(forward(*given)))

    return (jax.grad(loss, argnums=tuple(range(len(names)))) if gradient else forward), arrays


def _guarded(run: Callable[[], None]) -> int:
    """A mistake of the user is one line, and exit status 1."""
    try:
        run()
    except (ValueError, TypeError, NotImplementedError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
