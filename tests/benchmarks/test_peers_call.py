"""What `python -m benchmarks peers_call export` writes here, and the registration of the peers' handlers."""

import pytest
from jax import export

from benchmarks import peers_call

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl compiles a kernel")
pytest.importorskip("cuda.tile", reason="cuda-tile compiles a kernel")


def test_each_kernel_is_exported_for_both_handlers(tmp_path, monkeypatch):
    monkeypatch.setattr(peers_call, "LENGTHS", (1, 3))
    peers_call.write(tmp_path)
    assert len(list(tmp_path.iterdir())) == 8
    for kind, calls in peers_call.PAIRS.items():
        for call in calls:
            for length in (1, 3):
                loaded = export.deserialize(bytearray((tmp_path / f"{kind}-{call}-{length}.bin").read_bytes()))
                assert loaded.platforms == ("cuda",)
                assert [aval.shape for aval in loaded.in_avals] == [each.shape for each in peers_call.operands(kind)]
                text = loaded.mlir_module()
                assert peers_call.TARGETS[call] in text
                assert sum(peers_call.TARGETS[other] in text for other in peers_call.TARGETS) == 1


def test_the_peers_handlers_are_in_the_libraries_that_are_named():
    for register in peers_call.REGISTER.values():
        register()
