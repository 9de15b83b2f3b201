"""The derivative of an operation whose backward is an operation too: reverse mode for every engine.

The tangent of such an operation is a second primitive, linear in the tangents, whose transpose is the backward. Reverse
mode transposes it and never runs it. Forward mode runs it, which the reference engine alone serves: its function is
plain JAX, and has derivatives of every kind and order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

REFERENCE = "xla"

Pure = Callable[..., list[jax.Array]]
"""(*operands, names, config) -> the operation's results, in plain JAX."""
Reverse = Callable[[Any, Mapping[str, Any], Sequence[Any], frozenset[str], Sequence[Any]], Mapping[str, Any]]
"""(config, operands, what was kept, names of the operands that move, cotangents of the results or None) -> cotangents
of those that move, None for 0."""
Keeping = Callable[[Any, Mapping[str, Any], frozenset[str], Any], tuple[Sequence[Any], Sequence[Any]]]
"""(config, operands, names of those that move, notes) -> (the results, what the reverse needs beside the operands)."""


def refusal(name: str, what: str = "forward-mode or second derivative: use reverse mode (jax.grad) once") -> Exception:
    return NotImplementedError(f"cudnn_jax.{name} has no {what}, or implementation={REFERENCE!r}")


def define_backward(name: str, primitive: core.Primitive, pure: Pure) -> None:
    """A backward's derivative: plain JAX's where the reference engine is asked for, none elsewhere."""

    def jvp(primals: Any, tangents: Any, *, names: Sequence[str], config: Any, notes: Any) -> Any:
        if config.implementation != REFERENCE:
            raise refusal(name)
        return _pushed(partial(pure, names=names, config=config), primals, tangents)

    ad.primitive_jvps[primitive] = jvp


def define_forward(
    name: str,
    primitive: core.Primitive,
    abstract: Callable[..., Any],
    pure: Pure,
    reverse: Reverse,
    keeping: Keeping | None = None,
) -> None:
    """A forward's derivative, whose transpose is `reverse`. `abstract` is the primitive's rule.

    `keeping` runs the forward in the primitive's place, or raises NotImplementedError where it has no derivative; the
    operands are all that is kept if None.
    """
    tangent = core.Primitive(f"cudnn_jax.{name}.tangent")
    tangent.multiple_results = True

    def jvp(primals: Any, tangents: Any, *, names: Sequence[str], config: Any, notes: Any) -> Any:
        tangents = [t if _moves(x) else _zero(x) for x, t in zip(primals, tangents, strict=True)]
        moving = {each: t for each, t in zip(names, tangents, strict=True) if type(t) is not ad.Zero}
        if keeping is None:
            out, kept = primitive.bind(*primals, names=names, config=config, notes=notes), ()
        else:
            operands = dict(zip(names, primals, strict=True))
            try:
                out, kept = keeping(config, operands, frozenset(moving), notes)
            except NotImplementedError:
                if config.implementation != REFERENCE:
                    raise
                out, made = _pushed(partial(pure, names=names, config=config), primals, tangents)
                return out, [t if _moves(x) else _zero(x) for x, t in zip(out, made, strict=True)]
        made = [_zero(x) for x in out]
        moved = tuple(at for at, x in enumerate(out) if _moves(x))
        if moving and moved:
            params = {"names": names, "moving": tuple(moving), "moved": moved, "config": config}
            for at, t in zip(moved, tangent.bind(*primals, *kept, *moving.values(), **params), strict=True):
                made[at] = t
        return out, made

    def run(
        *args: Any, names: Sequence[str], moving: Sequence[str], moved: Sequence[int], config: Any
    ) -> list[jax.Array]:
        if config.implementation != REFERENCE:
            raise refusal(name) if keeping is None else refusal(name, "forward mode: use reverse mode (jax.grad)")
        given = dict(zip(moving, args[len(args) - len(moving) :], strict=True))
        primals = args[: len(names)]
        tangents = [given.get(each, ad.Zero(jax.typeof(x))) for each, x in zip(names, primals, strict=True)]
        made: list[jax.Array] = _pushed(partial(pure, names=names, config=config), primals, tangents)[1]
        return [made[at] for at in moved]

    def transpose(
        cotangents: Any, *args: Any, names: Sequence[str], moving: Sequence[str], moved: Sequence[int], config: Any
    ) -> list[Any]:
        operands = dict(zip(names, args[: len(names)], strict=True))
        given = [None] * len(abstract(*map(jax.typeof, operands.values()), names=names, config=config, notes=()))
        for at, ct in zip(moved, cotangents, strict=True):
            given[at] = None if type(ct) is ad.Zero else ct
        kept = args[len(names) : len(args) - len(moving)]
        made = reverse(config, operands, kept, frozenset(moving), given)
        zeros = {each: _zero(operands[each]) for each in moving}
        gradients = [zeros[each] if made[each] is None else made[each] for each in moving]
        return [None] * (len(args) - len(moving)) + gradients

    def mapped(args: Any, axes: Any, **params: Any) -> Any:
        made = jax.vmap(partial(run, **params), in_axes=tuple(axes))(*args)
        return made, [0] * len(made)

    def evaluate(*avals: Any, names: Sequence[str], moving: Sequence[str], moved: Sequence[int], config: Any) -> Any:
        made = abstract(*avals[: len(names)], names=names, config=config, notes=())
        return [made[at] for at in moved]

    tangent.def_impl(run)
    tangent.def_abstract_eval(evaluate)
    mlir.register_lowering(tangent, mlir.lower_fun(run, multiple_results=True))
    ad.primitive_transposes[tangent] = transpose
    ad.primitive_jvps[tangent] = lambda primals, tangents, **params: _pushed(partial(run, **params), primals, tangents)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[tangent] = mapped


def _moves(x: Any) -> bool:
    """Whether an array has tangents: where it is floating, but for float8_e8m0fnu, which has no 0."""
    dtype = jax.typeof(x).dtype
    return jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float8_e8m0fnu


def _zero(x: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _pushed(fn: Callable[..., Any], args: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """`jax.jvp` over the arguments that have a tangent."""
    moving = [at for at, t in enumerate(tangents) if type(t) is not ad.Zero]

    def run(*given: Any) -> Any:
        whole = list(args)
        for at, x in zip(moving, given, strict=True):
            whole[at] = x
        return fn(*whole)

    return jax.jvp(run, [args[at] for at in moving], [tangents[at] for at in moving])
