"""The one ranked plan list of norm graphs.

The cuTile engine leads with its settings in the order that it predicts, cuDNN's plans follow, the reference is last.
"""

from cudnn_jax.engines.ranking import recommend

__all__ = ["recommend"]
