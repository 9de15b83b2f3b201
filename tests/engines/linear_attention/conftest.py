import pytest


@pytest.fixture(autouse=True)
def _opted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNN_JAX_CUTILE_GDN", "1")
