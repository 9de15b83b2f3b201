"""Which candidates of a comparison compile and are right, so that nothing wrong is timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

from benchmarks import harness
from benchmarks.harness import Function
from cudnn_jax.engines.base import DECLINES


@dataclasses.dataclass
class Verified:
    """The candidates that compiled and are right, the errors of each, and why the others are not among them."""

    compiled: dict[str, Function] = dataclasses.field(default_factory=dict)
    errors: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    wrong: dict[str, str] = dataclasses.field(default_factory=dict)

    def leave_out(self, name: str, reason: str, fault: bool) -> None:
        (self.wrong if fault else self.left_out)[name] = reason


def verify(
    ours: Mapping[str, Function],
    others: Mapping[str, Function],
    arguments: tuple[jax.Array, ...],
    want: Mapping[str, jax.Array],
    tolerance: Mapping[str, float],
    threads: int,
) -> Verified:
    """Compiles and checks. A plan of ours may decline; whatever else stops it is a fault. A peer is only left out.

    `want` holds the right results by name, in the order in which a candidate returns them.
    """
    compiled, stopped = harness.compile_all({**ours, **others}, arguments, threads)
    verified = Verified()
    for name, error in stopped.items():
        verified.leave_out(name, harness.one_line(error), name in ours and not isinstance(error, DECLINES))
    for name, fn in compiled.items():
        try:
            errors, reason = check(fn, arguments, want, tolerance)
        except jax.errors.JaxRuntimeError as error:
            reason = harness.one_line(error)
        if reason:
            verified.leave_out(name, reason, name in ours)
        else:
            verified.compiled[name], verified.errors[name] = fn, errors
    return verified


def check(
    fn: Function, arguments: tuple[jax.Array, ...], want: Mapping[str, jax.Array], tolerance: Mapping[str, float]
) -> tuple[dict[str, float], str | None]:
    """Relative errors by result, and what is wrong with them, if anything."""
    harness.poison([jax.ShapeDtypeStruct(x.shape, arguments[0].dtype) for x in want.values()])
    got = dict(zip(want, fn(*arguments), strict=False))
    errors = {name: harness.relative_error(x, want[name]) for name, x in got.items()}
    bad = {name: error for name, error in errors.items() if not error <= tolerance[name]}
    return errors, f"relative error {bad}" if bad else None
