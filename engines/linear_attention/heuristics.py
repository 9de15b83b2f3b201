"""The one ranked plan list of linear attention graphs. `placement.json` beside this file holds what it rests on.

Sequences of a token or a few go to the kernel that runs them token by token, others to the one that cuts them in
chunks.
"""

from cudnn_jax.engines.ranking import measured

recommend = measured("linear_attention")
