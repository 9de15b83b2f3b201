"""The one ranked plan list of pointwise graphs. `placement.json` beside this file holds what it rests on."""

from cudnn_jax.engines.ranking import measured

recommend = measured("pointwise")
