"""Which folders and files programs may be read from, with real owners and modes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cudnn_jax.engines import trust


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A trusted folder: pytest makes its own for one user alone, under a sticky /tmp."""
    tmp_path.chmod(0o700)
    if reason := trust.reason_against(tmp_path):
        pytest.skip(f"the folder for temporary files is not trusted: {reason}")
    return tmp_path


def test_ones_own_folder_and_file_are_trusted(home: Path) -> None:
    file = home / "one.program"
    file.write_bytes(b"program")
    file.chmod(0o644)
    assert trust.require(file) == file.resolve() and trust.require(home) == home.resolve()
    assert trust.require(Path("/usr")) == Path("/usr")  # root's


@pytest.mark.parametrize("mode", [0o770, 0o757, 0o777, 0o1777])
@pytest.mark.parametrize("where", ["itself", "above"])
def test_what_others_may_write_is_refused(home: Path, mode: int, where: str) -> None:
    folder = home / "outer" / "inner"
    folder.mkdir(parents=True)
    open_one = folder if where == "itself" else folder.parent
    open_one.chmod(mode)
    # A sticky folder of one's own protects nothing from its owner's group, but root's above does.
    if where == "above" and mode == 0o1777 and os.getuid() == 0:
        assert trust.require(folder) == folder.resolve()
        return
    with pytest.raises(trust.UntrustedPathError) as raised:
        trust.require(folder)
    assert f"{open_one.resolve()} has mode {mode:04o}, the rule is writable by its owner alone" in str(raised.value)
    open_one.chmod(0o755)
    assert trust.require(folder) == folder.resolve()


def test_a_file_that_others_may_write_is_refused(home: Path) -> None:
    file = home / "one.program"
    file.write_bytes(b"program")
    file.chmod(0o666)
    assert "has mode 0666" in str(trust.reason_against(file))


def test_a_link_is_judged_by_what_it_leads_to(home: Path) -> None:
    open_folder = home / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    link = home / "link"
    link.symlink_to(open_folder)
    with pytest.raises(trust.UntrustedPathError, match="has mode 0777"):
        trust.require(link)
    open_folder.chmod(0o755)
    assert trust.require(link) == open_folder.resolve()


def test_another_users_folder_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / "theirs"
    folder.mkdir()
    if os.getuid() == 0:
        os.chown(folder, 12345, -1)
        owner = 12345
    else:
        owner = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(trust.UntrustedPathError, match=f"belongs to user {owner}, the rule is yours"):
        trust.require(folder)


def test_a_path_that_is_not_there_is_another_error(home: Path) -> None:
    with pytest.raises(FileNotFoundError):
        trust.require(home / "nothing")
