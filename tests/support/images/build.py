"""Builds the DSL engines' images as they ship, through planning, and reads what their kernels take."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgpack

from cudnn_jax import engines
from cudnn_jax.engines.base import PlanConfig, Program
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError
from support.images import elf

ROOM = Path(engines.__path__[0])
CACHE = Path("build", "images")
DEVICES = {80: ("NVIDIA A100", 108), 90: ("NVIDIA H200", 132), 100: ("NVIDIA B200", 148), 120: ("NVIDIA RTX 5090", 170)}
"""Compute capability -> (a device of it, its multiprocessors)."""
KINDS = {"cutile": (80, 90, 100, 120), "cutedsl": (90,)}
"""What an engine is made with -> the compute capabilities that its images are checked for."""
GLUE = ("cutile.py", "cutedsl.py")
COMPILERS = ("cuda-tile", "nvidia-cuda-tileiras", "nvidia-cutlass-dsl")

Kernels = dict[str, list[int]]
"""Kernel -> [registers, local bytes, shared bytes, threads]."""


@dataclass(frozen=True)
class Job:
    """One sample graph of a family's folder, by its position, for one kind of engine and one compute capability."""

    folder: str
    position: int
    sample: str
    kind: str
    sm: int

    @property
    def name(self) -> str:
        return f"{self.sample}, {self.kind}, sm_{self.sm}"


@dataclass(frozen=True)
class Built:
    """What a job made. `plans` holds, best first, each plan's name and kernels."""

    key: str
    plans: list[tuple[str, Kernels]]


def jobs() -> list[Job]:
    """Every sample of every folder that has some, for each kind of engine that has a plan for it."""
    found = []
    for folder in sorted(path.parent.name for path in ROOM.glob("*/samples.py")):
        for position, (sample, graph) in enumerate(_samples(folder)):
            graph.freeze()
            for kind, sms in KINDS.items():
                found += [Job(folder, position, sample, kind, sm) for sm in sms if _served(folder, position, kind, sm)]
    return found


def key(job: Job) -> str:
    """Changes with all that images and their order are made of: the graph, the target, the sources, the measurements and
    the compilers."""
    room = ROOM / job.folder
    sources = [
        *sorted(room.glob("*.py")),
        *room.glob("placement.json"),
        *(path for name in GLUE if (path := ROOM / name).is_file()),
    ]
    digest = hashlib.sha256()
    _, graph = _samples(job.folder)[job.position]
    told = [graph.hash(), job.kind, job.sm, *DEVICES[job.sm], sorted(compilers().items())]
    digest.update(json.dumps(told).encode())
    for path in sources:
        if not path.name.startswith(("samples", "reference")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def compilers() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in COMPILERS}


def build(job: Job) -> Built:
    """Builds every plan of a job, or reads from `build/images` what an equal job found."""
    digest = key(job)
    cached = CACHE / f"{digest}.json"
    if cached.is_file():
        stored = json.loads(cached.read_text())
        return Built(digest, [(name, kernels) for name, kernels in stored["plans"]])
    graph = _planned(job.folder, job.position, job.kind, job.sm)
    built = Built(digest, [(plan.name, kernels_of(program)) for plan, program in _programs(graph)])
    cached.parent.mkdir(parents=True, exist_ok=True)
    cached.write_text(json.dumps(asdict(built)))
    return built


def kernels_of(program: Program) -> Kernels:
    """What each kernel of a program takes. Kernels of one name count with the largest of each number."""
    found: Kernels = {}
    for step in msgpack.unpackb(msgpack.unpackb(program.data)["payload"])["steps"]:
        for image in elf.images_in(step.get("image") or step.get("object") or b""):
            for name, taken in elf.kernels(image).items():
                numbers = [taken.registers, taken.local, taken.shared, taken.threads]
                found[name] = [max(pair) for pair in zip(numbers, found.get(name, numbers), strict=True)]
    return found


def _programs(graph: pygraph) -> Iterator[tuple[PlanConfig, Program]]:
    for at, plan in enumerate(graph.plans):
        graph.select_plan(at)
        _, program = graph.build_plans()
        assert isinstance(program, Program)
        yield plan, program


def _served(folder: str, position: int, kind: str, sm: int) -> bool:
    try:
        _planned(folder, position, kind, sm)
    except GraphNotSupportedError:
        return False
    return True


def _planned(folder: str, position: int, kind: str, sm: int) -> pygraph:
    device, count = DEVICES[sm]
    _, graph = _samples(folder)[position]
    graph.create_execution_plans(target=Target("cuda", device, sm, count), implementation=kind)
    return graph


def _samples(folder: str) -> list[tuple[str, pygraph]]:
    made: Any = importlib.import_module(f"cudnn_jax.engines.{folder}.samples").samples()
    return list(made)
