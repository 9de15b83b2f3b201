"""The one ranked plan list of pointwise graphs: a fused kernel where one fits, cuDNN's plans, the reference engine."""

from cudnn_jax.engines.ranking import recommend

__all__ = ["recommend"]
