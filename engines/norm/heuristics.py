"""The one ranked plan list of norm graphs.

The cuTile engine leads: on an H200 its first setting was faster than jitted jax.numpy and than the reference in every
case of `python -m benchmarks norm`. cuDNN's plans follow, the reference is last.
"""

from cudnn_jax.engines.ranking import recommend

__all__ = ["recommend"]
