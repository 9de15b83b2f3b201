"""The one ranked plan list of attention graphs.

cuDNN leads wherever it has a plan, in cuDNN's own order within a mode, and the reference engine follows. On an H200
with cuDNN 9.19 the first plan of mode A was the fastest, or tied with it, in every case of benchmarks/sdpa.py; the
figures are under benchmarks/results.
"""

from cudnn_jax.engines.ranking import recommend

__all__ = ["recommend"]
