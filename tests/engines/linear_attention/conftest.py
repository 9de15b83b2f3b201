import pytest


@pytest.fixture(autouse=True)
def _opted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GDN", "KDA"):
        monkeypatch.setenv(f"CUDNN_JAX_CUTILE_{name}", "1")
