"""The one ranked plan list of linear attention graphs.

The order is that of the slots until `python -m benchmarks gdn` has run: `placement.json` beside this file will then say
for which lengths the kernel leads that runs sequences token by token.
"""

from cudnn_jax.engines.ranking import measured

recommend = measured("linear_attention")
