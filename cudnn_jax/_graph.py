"""`cudnn_jax.pygraph`: the graph with planning on top, and as a function of JAX arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from cudnn_jax.engines import planning

if TYPE_CHECKING:
    import jax


class pygraph(planning.pygraph):
    __doc__ = planning.pygraph.__doc__

    def as_jax(self, implementation: str | None = None) -> Callable[..., tuple[jax.Array, ...]]:
        """The graph as a function of JAX arrays, to be called, jitted, or given to `jax.export`; it is frozen by this.

        The function takes one array for each of `inputs` and returns one for each of `outputs`, as `cudnn_jax.call`
        does, which says more.

        Args:
          implementation: as `cudnn_jax.call` takes it.

        Raises:
          GraphValidationError: the graph breaks a rule.
        """
        from cudnn_jax.ops.call import call  # loads jax, which graphs do without

        self.freeze()
        return partial(call, self, implementation=implementation)
