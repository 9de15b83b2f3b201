"""Plans and programs on disk: round trips, damage, processes that die or write at once, and the bound on size."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from cudnn_jax.engines.base import Decline, PlanConfig
from cudnn_jax.engines.store import Store, Stored

PLAN = PlanConfig(21_000, (("tile", 4), ("warps", 8)), engine="rows", kind="cutile", mode="A", workspace=512)
BEHIND = PlanConfig(3, (), engine="cudnn", kind="cudnn", mode="FALLBACK")


def stored(program: bytes | None = b"program", derived: bool = False) -> Stored:
    declines = (Decline("other", "dtype int8, serves float32"),)
    return Stored(PLAN, (PLAN, BEHIND), declines, program, derived)


def described(plan: PlanConfig) -> tuple[object, ...]:
    return (plan, plan.engine, plan.kind, plan.mode, plan.workspace)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("program", [b"program", b"", None])
@pytest.mark.parametrize("derived", [True, False])
def test_what_was_stored_comes_back_in_another_store(tmp_path: Path, program: bytes | None, derived: bool) -> None:
    Store(tmp_path).store("key", stored(program, derived))
    back = Store(tmp_path).load("key")
    assert back == stored(program, derived)
    # Equality of plans leaves out what only describes them.
    assert described(back.plan) == described(PLAN)
    assert list(map(described, back.plans)) == list(map(described, (PLAN, BEHIND)))
    assert Store(tmp_path).load("another key") is None


def test_one_program_of_two_graphs_is_kept_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.store("one", stored())
    store.store("two", stored())
    assert [path.parent.name for path in files(tmp_path)] == ["plans", "plans", "programs"]


@pytest.mark.parametrize("folder", ["plans", "programs"])
def test_a_damaged_file_is_dropped_and_made_anew(tmp_path: Path, folder: str) -> None:
    store = Store(tmp_path)
    store.store("key", stored(os.urandom(400)))
    (path,) = (path for path in files(tmp_path) if path.parent.name == folder)
    sound = path.read_bytes()
    for at in range(0, 8 * len(sound), 7):
        damaged = bytearray(sound)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        assert store.load("key") is None
        assert not path.exists()
    for length in range(len(sound)):
        path.write_bytes(sound[:length])
        assert store.load("key") is None
    path.write_bytes(sound)
    assert store.load("key") is not None


def test_a_missing_program_is_nothing_stored(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.store("key", stored())
    next(path for path in files(tmp_path) if path.parent.name == "programs").unlink()
    assert store.load("key") is None


def test_the_longest_unused_programs_go_first(tmp_path: Path) -> None:
    store = Store(tmp_path, limit=4000)
    for number in range(2):
        store.store(str(number), stored(bytes([number]) * 1000))
        path = next(path for path in files(tmp_path) if path.read_bytes() == bytes([number]) * 1000)
        os.utime(path, (1000 + number, 1000 + number))
    assert store.load("0") is not None  # used now, so "1" is the older
    store.store("2", stored(b"\2" * 1000))
    assert [store.load(key) is not None for key in "012"] == [True, False, True]


def test_what_a_dead_writer_left_is_cleared(tmp_path: Path) -> None:
    store = Store(tmp_path, limit=1 << 20)
    store.store("key", stored())
    folder = next(path for path in files(tmp_path) if path.parent.name == "programs").parent
    fresh, old = folder / ".new-fresh", folder / ".new-old"
    for path in (fresh, old):
        path.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    store.store("another", stored(b"more"))
    assert fresh.exists() and not old.exists()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = Store(tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        store.store("key", stored())
    assert store.load("key") is None


def test_records_are_bounded_too(tmp_path: Path) -> None:
    store = Store(tmp_path, limit=5000)
    for number in range(40):
        store.store(str(number), stored(None))
    assert 0 < sum(path.stat().st_size for path in files(tmp_path)) <= 5000
    assert store.load("39") is not None


WRITER = """
import os, signal, sys, time, random
from pathlib import Path
from cudnn_jax.engines.base import PlanConfig
from cudnn_jax.engines.store import Store, Stored

folder, mode, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
plan = PlanConfig(1, (), engine="e", kind="k")
programs = {str(n): bytes([n]) * (200_000 + n) for n in range(4)}

def write(key):
    Store(folder).store(key, Stored(plan, (plan,), (), programs[key], False))

def check():
    sound = 0
    for key, program in programs.items():
        found = Store(folder).load(key)
        assert found is None or found.program == program, key
        sound += found is not None
    for path in (folder / "v2").rglob("*"):
        assert path.is_dir() or path.name.startswith(".new-") or path.stat().st_size, path
    return sound

rng = random.Random(seed)
if mode == "once":
    for _ in range(20):
        write("0")
        check()
else:
    dead_in_the_middle = 0
    for _ in range(200):
        pid = os.fork()
        if pid == 0:
            while True:
                write(rng.choice("0123"))
        time.sleep(rng.uniform(0.0005, 0.006))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        before = len(list(folder.rglob("programs/*")))
        check()
        assert len(list(folder.rglob("programs/*"))) == before, "a sound-looking file was damaged"
    dead_in_the_middle = len(list(folder.rglob(".new-*")))
    print(check(), dead_in_the_middle)
"""


def test_200_writers_killed_in_the_middle_leave_nothing_corrupt(tmp_path: Path) -> None:
    seed = str(random.randrange(1 << 30))
    command = [sys.executable, "-c", WRITER, str(tmp_path), "kill", seed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    sound, dead = map(int, done.stdout.split())
    # Without these the test would have shown nothing.
    assert sound > 0 and dead > 0


def test_16_processes_write_one_key_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), "once", "0"]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(16)]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert [path.name.startswith(".") for path in files(tmp_path)] == [False, False]
