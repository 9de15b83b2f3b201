"""The one ranked plan list of attention graphs. `placement.json` beside this file holds what it rests on.

Among cuDNN's plans the order is cuDNN's own: on an H200 with cuDNN 9.19 its first was the fastest, or tied with it, in
every case of `python -m benchmarks sdpa`.
"""

from cudnn_jax.engines.ranking import measured

recommend = measured("sdpa")
