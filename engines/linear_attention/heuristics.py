"""The one ranked plan list of linear attention graphs. `placement.json` beside this file says for which lengths the
kernel leads that runs sequences token by token.
"""

from cudnn_jax.engines.ranking import measured

recommend = measured("linear_attention")
