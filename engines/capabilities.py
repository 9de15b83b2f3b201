"""What an engine can do, as a table row that judges facts and answers in words."""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_jax.engines.target import Target
from cudnn_jax.graph import data_type


@dataclass(frozen=True)
class Capabilities:
    """The part of a capability row that every family shares: where an engine runs, and on what.

    Attributes:
      platforms: XLA platforms, empty for any.
      sm_lo, sm_hi: inclusive range of compute capabilities (major * 10 + minor): a range, since a kernel serves a
        line of GPUs and not the members that exist today.
      dtypes: accepted element types, empty for any.
      compute: types that an engine can compute in, empty for any.
    """

    platforms: frozenset[str] = frozenset()
    sm_lo: int = 0
    sm_hi: int = 10_000
    dtypes: frozenset[data_type] = frozenset()
    compute: frozenset[data_type] = frozenset()

    def place(self, target: Target) -> str | None:
        """Why `target` is out of reach, or None."""
        if self.platforms and target.platform not in self.platforms:
            return f"platform {target.platform}, serves {' and '.join(sorted(self.platforms))}"
        if target.platform == "cuda" and not self.sm_lo <= (target.sm or 0) <= self.sm_hi:
            return f"architecture sm_{target.sm}, serves sm_{self.sm_lo} to sm_{self.sm_hi}"
        return None

    def element_type(self, dtype: data_type) -> str | None:
        """Why `dtype` is not served, or None."""
        return _outside("dtype", dtype, self.dtypes)

    def compute_type(self, dtype: data_type) -> str | None:
        """Why computing in `dtype` is not served, or None."""
        return _outside("compute type", dtype, self.compute)


def _outside(what: str, dtype: data_type, served: frozenset[data_type]) -> str | None:
    if served and dtype not in served:
        return f"{what} {dtype.value}, serves {', '.join(sorted(t.value for t in served))}"
    return None
