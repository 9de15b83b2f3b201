"""The cuTile programs of Gated DeltaNet compile, and hold no path of the machine that compiled them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudnn_jax import _ffi, engines
from cudnn_jax.engines import cutile
from cudnn_jax.engines.linear_attention import samples
from cudnn_jax.engines.target import named

DIRECTIONS = {"cutile_gdn_recurrent": samples.forward, "cutile_gdn": samples.forward, "backward": samples.backward}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_a_program_compiles_for_an_h200(name: str) -> None:
    try:
        cutile.available()
    except ImportError as error:
        pytest.skip(str(error))
    graph = DIRECTIONS[name]((100, 30), 2, 64, 64, use_qk_l2norm=True)
    graph.create_execution_plans(target=named("h200"), implementation=name if "cutile" in name else "cutile_gdn")
    _, program = graph.build_plans()
    seen = _ffi.program_check(program.data)
    assert seen["arch"] == 90 and set(seen["steps"]) <= {"cubin", "fill"}
    assert str(Path(engines.__path__[0])).encode() not in program.data
