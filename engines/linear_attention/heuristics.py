"""The one ranked plan list of linear attention graphs: our kernels, the reference last. cuDNN has no plan."""

from cudnn_jax.engines.ranking import recommend

__all__ = ["recommend"]
