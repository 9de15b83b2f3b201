"""What an image takes, as read from its bytes, and what the table of images lets pass."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from cudnn_jax.engines import cutile
from cudnn_jax.engines.cutile import Array
from cudnn_jax.engines.target import named
from cudnn_jax.graph import data_type
from support.images import build, elf, table
from support.images.build import Built, Job

H200 = named("h200")
JOB = Job("norm", 0, "a graph", "cutile", 90)
FIRST = {"kernel": [80, 0, 1040, 128]}


def image(cols: int, chunk: int, warps: int) -> bytes:
    from cudnn_jax.engines.norm import _rmsnorm_cutile as kernels

    matrix = Array(data_type.FLOAT, (64, cols))
    constants = [1, chunk, cols // chunk, 1, 0, cols, 1e-5, False, False, False, False]
    arrays = [matrix, False, False, matrix, False]
    return cutile.compile_kernel(kernels.rms_norm_forward, [*arrays, *constants], H200, num_worker_warps=warps).data


def test_a_kernel_that_holds_too_much_is_seen_to_use_local_memory() -> None:
    (small,) = elf.kernels(image(1024, 1024, 8)).values()
    assert 16 <= small.registers < 128 and small.local == 0 and small.threads == 256
    (large,) = elf.kernels(image(65536, 65536, 4)).values()
    assert large.registers == 255 and large.local > 256 and large.threads == 128
    assert small.shared > 0


def test_images_are_found_inside_other_bytes() -> None:
    inner = image(1024, 1024, 8)
    host = elf.MAGIC + bytes(12) + (62).to_bytes(2, "little") + bytes(100)
    (found,) = elf.images_in(host + inner + b"tail")
    assert elf.kernels(found) == elf.kernels(inner)
    assert elf.images_in(b"nothing") == []
    with pytest.raises(ValueError, match="not a CUDA image"):
        elf.kernels(host)


COMPILE = """
import sys
sys.path[:0] = [{tests!r}, {here!r}]
import test_images
data = test_images.image(2048, 1024, 8)
sys.stdout.write(__import__("hashlib").sha256(data).hexdigest())
"""


def test_equal_sources_make_equal_bytes_in_every_process_and_folder(tmp_path) -> None:
    here = os.path.dirname(__file__)
    code = COMPILE.format(tests=os.path.dirname(here), here=here)
    digests = set()
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed, "CUDA_TILE_CACHE_DIR": "off", "TMPDIR": str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=folder
        )
        digests.add(done.stdout)
    assert len(digests) == 1
    made = image(2048, 1024, 8)
    assert b"cudnn_jax/engines/norm" in made
    assert os.path.dirname(cutile.__file__).encode() not in made


def told(*plans, exceptions=(), **old) -> list[str]:
    known = {"exceptions": dict(exceptions), "images": {name: {"key": "", "plans": made} for name, made in old.items()}}
    return table.problems(known, {JOB: Built("", list(plans))}, every=True)


def test_what_the_table_holds_passes() -> None:
    assert told(("a", FIRST), ("b", FIRST), **{JOB.name: {"a": FIRST, "b": FIRST}}) == []


@pytest.mark.parametrize(
    ("plans", "old", "line"),
    [
        ([("a", FIRST)], {}, "a: kernel is not in the table; run make check UPDATE=1"),
        (
            [("a", FIRST)],
            {"a": {"kernel": [79, 0, 1040, 128]}},
            "a: kernel: registers 79 -> 80; run make check UPDATE=1",
        ),
        ([("a", FIRST)], {"a": FIRST, "b": FIRST}, "b: kernel is in the table and was not built; run make check"),
        ([("a", FIRST), ("b", FIRST)], {"b": FIRST, "a": FIRST}, "plans are ranked a, b, the table has b, a; run"),
    ],
)
def test_a_change_names_the_command_that_takes_it(plans, old, line) -> None:
    (problem,) = told(*plans, **{JOB.name: old})
    assert problem.startswith(f"a graph, cutile, sm_90: {line}")


def test_an_entry_without_a_sample_is_a_problem() -> None:
    lines = told(("a", FIRST), **{JOB.name: {"a": FIRST}, "gone": {"a": FIRST}})
    assert lines == ["gone: is in the table and no sample; run make check UPDATE=1"]


def test_local_memory_fails_in_the_first_plan_unless_the_table_says_why() -> None:
    spilled = {"kernel": [255, 64, 0, 128]}
    known = {JOB.name: {"a": spilled, "b": spilled}}
    (line,) = told(("a", spilled), ("b", spilled), **known)
    assert "a: kernel: 64 bytes of local memory; the rule: 0 in the plan ranked first" in line
    excuse = [(f"{JOB.name}, kernel", "3900 GB/s with it, 3500 without")]
    assert told(("a", spilled), ("b", spilled), exceptions=excuse, **known) == []
    assert told(("a", FIRST), ("b", spilled), **{JOB.name: {"a": FIRST, "b": spilled}}) == []
    assert len(told(("a", spilled), ("b", spilled), exceptions=[(f"{JOB.name}, kernel", "")], **known)) == 1


def test_an_update_keeps_what_is_written_by_hand_and_what_was_not_built() -> None:
    other = dataclasses.replace(JOB, sm=JOB.sm + 10)
    old = {
        "fields": [],
        "compilers": {},
        "exceptions": {"x": "why"},
        "images": {"gone": {}, other.name: {"key": "old"}},
    }
    new = table.updated(old, {JOB: Built("key", [("a", FIRST)])}, [JOB, other], {"cuda-tile": "1"})
    assert new["exceptions"] == {"x": "why"} and new["compilers"] == {"cuda-tile": "1"}
    assert new["images"] == {JOB.name: {"key": "key", "plans": {"a": FIRST}}, other.name: {"key": "old"}}


def test_the_table_knows_every_sample() -> None:
    """Whether the numbers hold is for `make check`, which builds."""
    known = table.read()
    assert set(known["images"]) == {job.name for job in build.jobs()}


@pytest.mark.parametrize("changed", ["facts.py", "placement.json"])
def test_a_key_changes_with_the_sources_and_the_measurements(changed: str, monkeypatch, tmp_path) -> None:
    job = next(job for job in build.jobs() if (build.ROOM / job.folder / "placement.json").is_file())
    before = build.key(job)
    assert before == build.key(job)
    folder = tmp_path / job.folder
    folder.mkdir()
    for path in (build.ROOM / job.folder).iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    for name in build.GLUE:
        if (build.ROOM / name).is_file():
            (tmp_path / name).write_bytes((build.ROOM / name).read_bytes())
    monkeypatch.setattr(build, "ROOM", tmp_path)
    assert build.key(job) == before
    (folder / changed).write_bytes(b"# changed\n")
    assert build.key(job) != before
