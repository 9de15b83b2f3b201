"""What importing each room loads, measured in fresh interpreters."""

from __future__ import annotations

import importlib
import pathlib
import re
import subprocess
import sys

import pytest

import cudnn_jax

HEAVY = ("jax", "jaxlib", "torch", "cutlass", "cuda.tile", "flax", "numpy")


def loaded_by(code: str) -> set[str]:
    report = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["cudnn_jax", "cudnn_jax.graph"])
def test_the_graph_and_the_package_load_no_framework(module: str) -> None:
    added = loaded_by(f"import {module}") - loaded_by("pass")
    assert not added & set(HEAVY)


def test_modules_of_engines_are_loaded_when_they_are_named() -> None:
    loaded = loaded_by("import cudnn_jax; assert cudnn_jax.engines.target.CPU.platform == 'cpu'")
    assert "cudnn_jax.engines.target" in loaded
    assert not loaded & {*HEAVY, "cudnn_jax.engines.planning"}
    assert "cudnn_jax.engines.target" not in loaded_by("import cudnn_jax; dir(cudnn_jax.engines)")
    for name in cudnn_jax.engines._MODULES:
        assert importlib.import_module(f"cudnn_jax.engines.{name}") is getattr(cudnn_jax.engines, name)
    with pytest.raises(AttributeError, match=r"module 'cudnn_jax\.engines' has no attribute 'targets'"):
        cudnn_jax.engines.targets  # noqa: B018


def test_the_graph_needs_the_standard_library_only() -> None:
    added = loaded_by("import cudnn_jax.graph") - loaded_by("pass")
    foreign = {name for name in added if name.split(".")[0] not in sys.stdlib_module_names} - {"cudnn_jax"}
    assert {name for name in foreign if not name.startswith(("cudnn_jax", "_cudnn_jax"))} == set()


DECIDE = """
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import CPU, named
from cudnn_jax.graph import data_type
graph = pygraph(io_data_type=data_type.BFLOAT16)
q, k, v = (graph.tensor(dim=(2, 4, 16, 64)) for _ in range(3))
out, _ = graph.sdpa(q, k, v, generate_stats=False)
out.set_output(True)
graph.create_execution_plans(target=CPU)
assert graph.plans
"""


DECIDE_NORM = """
from cudnn_jax.engines.norm import samples
from cudnn_jax.engines.target import named
graph = samples.forward(64, 128)
graph.create_execution_plans(target=named("h200"), implementation="cutile")
assert graph.plans
"""


DECIDE_GDN = """
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import CPU
graph = pygraph(io_data_type="float32")
q, k, v = (graph.tensor((16, 2, 8)) for _ in range(3))
g, beta = graph.tensor((16, 2)), graph.tensor((16, 2))
out, _, _ = graph.gdn(q, k, v, g, beta, graph.tensor((2,), data_type="int32"))
out.set_output(True)
graph.create_execution_plans(target=CPU)
assert graph.plans
"""


DECIDE_GENERIC = """
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import CPU
graph = pygraph(io_data_type="float32")
q, k, v = (graph.tensor((2, 4, 16, 64)) for _ in range(3))
out, _ = graph.sdpa(graph.relu(q), k, v)
graph.reduction(graph.transpose(out, (0, 1, 3, 2)), mode="MAX").set_dim((2, 4, 1, 16)).set_output(True)
graph.create_execution_plans(target=CPU)
assert [plan.engine_id for plan in graph.plans] == [21_999]
graph.draw(), graph.inspect(), pygraph.from_json(graph.to_json())
"""


@pytest.mark.parametrize("code", [DECIDE, DECIDE_NORM, DECIDE_GDN, DECIDE_GENERIC])
def test_deciding_which_engines_serve_loads_no_dsl_and_no_jax(code: str) -> None:
    assert not loaded_by(code) & (set(HEAVY) - {"numpy"})


def test_no_file_imports_the_rooms_by_their_folder_names() -> None:
    """An editable install leaves the repository root importable, so `import graph` would work by accident."""
    root = pathlib.Path(__file__).parent.parent
    wrong = re.compile(r"^\s*(?:import|from)\s+(?:graph|engines|ffi)\b", re.MULTILINE)
    sources = [
        file
        for room in ("cudnn_jax", "engines", "graph", "tests", "benchmarks", "examples")
        for file in (root / room).rglob("*.py")
    ]
    assert len(sources) > 20
    assert [str(file) for file in sources if wrong.search(file.read_text())] == []
