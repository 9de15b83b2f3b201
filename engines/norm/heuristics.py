"""The one ranked plan list of norm graphs. `placement.json` beside this file holds what it rests on."""

from cudnn_jax.engines.ranking import measured

recommend = measured("norm")
