"""`python -m benchmarks peers_call`: one kernel through our handler and through its DSL's own JAX call.

`export FOLDER` needs the compilers and no GPU: it writes each kernel as a chain of calls, exported for an H200. `run
FOLDER` needs a GPU and no compiler: it times the chains in turns. On arrays this small the host is what takes time, so
the slope over the length of the chain is what one call costs it: handler, launch and XLA's own share, the last two
being the same for both. Handlers: ours; `cutlass.jax.cutlass_call`'s in libcute_dsl_runtime.so; and
`cuda.tile.jax.cutile_call`'s in cuda-tile's extension module.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from benchmarks import harness, report
from cudnn_jax.engines import libraries

ROWS, COLS = 64, 1024
LENGTHS = (1, 129)
PAIRS = {"cute": ("ours", "cutlass_call"), "cubin": ("ours", "cutile_call")}
"""Kind of step -> the calls that run the same kernel."""

TARGETS = {
    "ours": "cudnn_jax.program",
    "cutlass_call": "CuteDSLRT_NvJaxCutlassCall_v2",
    "cutile_call": "cutile_launch",
}
"""Call -> the name of its custom call."""

Step = Callable[..., Any]
"""(x, *the rest of the operands) -> the next x."""


# ---- The kernels, each in two ways ------------------------------------------------------------------------


def pointwise_graph() -> Any:
    from cudnn_jax.engines.pointwise import samples

    return samples.bias_gelu(ROWS, COLS)


def norm_graph() -> Any:
    from cudnn_jax.engines.norm import samples

    return samples.forward(ROWS, COLS, bias=True)


def ours(graph_of: Callable[[], Any], engine: str) -> Step:
    import cudnn_jax

    return lambda *arrays: cudnn_jax.call(graph_of(), *arrays, implementation=engine)[0]


def knobs_of(graph: Any, engine: str) -> tuple[Any, dict[str, int]]:
    """The facts and the setting that ours runs with."""
    from cudnn_jax.engines import manifest
    from cudnn_jax.engines.target import named

    graph.create_execution_plans(target=named("h200"), implementation=engine)
    return manifest.facts_of(graph, manifest.family_for(graph)), dict(graph.plans[0].knobs)


def cutlass_call() -> Step:
    from cudnn_jax.engines import cutedsl

    facts, knobs = knobs_of(pointwise_graph(), "cutedsl_bias_gelu")
    kernels = cutedsl.kernels("cudnn_jax.engines.pointwise._bias_gelu_cutedsl")
    peer = importlib.import_module("cutlass.jax")
    function = kernels.function(facts.bias_gelu, **knobs)

    def launch(stream: Any, *tensors: Any) -> None:
        function(*(tensor.iterator for tensor in tensors), stream)

    def step(x: Any, *rest: Any) -> Any:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = peer.cutlass_call(
            launch, output_shape_dtype=like, use_static_tensors=True, compile_options=cutedsl.options(_h200())
        )
        return call(x, *rest)

    return step


def cutile_call() -> Step:
    import cuda.tile as ct
    import cuda.tile._compile as compiler

    from cudnn_jax.engines import cutile
    from cudnn_jax.engines.norm import _rmsnorm_cutile as kernels
    from cudnn_jax.engines.norm.rmsnorm_tiles import Tiling

    compiler.get_sm_arch = lambda *_: cutile.gpu_code(_h200())  # it asks the driver, and there is none
    peer = importlib.import_module("cuda.tile.jax")
    facts, knobs = knobs_of(norm_graph(), "cutile_rmsnorm")
    tiling = Tiling.of(facts, tuple(knobs.items()))
    kernel = ct.kernel(kernels.rms_norm_forward, **tiling.hints)
    cut = (tiling.rows, tiling.chunk, tiling.chunks, *tiling.reread(facts))
    constants = (*cut, COLS, facts.epsilon, True, True, True, tiling.ragged(facts))

    def step(x: Any, scale: Any, bias: Any) -> Any:
        made = (peer.OutputPlaceholder(x.shape, x.dtype), peer.OutputPlaceholder((ROWS,), jnp.float32))
        grid = (tiling.grid(facts, _h200().sm_count),)
        return peer.cutile_call(grid, kernel, (x, scale[0], bias[0], *made, *constants))[0]

    return step


def _h200() -> Any:
    from cudnn_jax.engines.target import named

    return named("h200")


STEPS: dict[tuple[str, str], Callable[[], Step]] = {
    ("cute", "ours"): lambda: ours(pointwise_graph, "cutedsl_bias_gelu"),
    ("cute", "cutlass_call"): cutlass_call,
    ("cubin", "ours"): lambda: ours(norm_graph, "cutile_rmsnorm"),
    ("cubin", "cutile_call"): cutile_call,
}


# ---- Here: export -----------------------------------------------------------------------------------------


def chain(step: Step, length: int) -> Step:
    def run(x: Any, *rest: Any) -> Any:
        for _ in range(length):
            x = step(x, *rest)
        return x

    return run


def operands(kind: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    matrix, row = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((ROWS, COLS), (1, COLS)))
    return (matrix, row, matrix) if kind == "cute" else (matrix, row, row)


def write(folder: Path) -> None:
    import cudnn_jax

    folder.mkdir(parents=True, exist_ok=True)
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in TARGETS.values()]
    for (kind, call), make in STEPS.items():
        step = make()
        for length in LENGTHS:
            with cudnn_jax.aot.target("h200"):
                traced = jax.jit(chain(step, length))
                made = export.export(traced, platforms=["cuda"], disabled_checks=checks)(*operands(kind))
            assert f"@{TARGETS[call]}" in made.mlir_module()
            path = folder / f"{kind}-{call}-{length}.bin"
            path.write_bytes(made.serialize())
            print(f"{path}: {path.stat().st_size / 1e3:.0f} KB")


# ---- On the GPU: run --------------------------------------------------------------------------------------


def register_cutlass_call() -> None:
    """As `cutlass.jax` registers its handlers, from the runtime library alone."""
    (path, *_) = [*libraries.candidates()["cute_dsl_runtime"], "libcute_dsl_runtime.so"]
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(str(error)) from None

    def capsule(name: str, called: bool) -> Any:
        function = getattr(library, name)
        function.restype = ctypes.c_void_p
        return jax.ffi.pycapsule(function() if called else function)

    prefix = "CuteDSLRT_NvJaxCutlassCall"
    state = {"type_id": f"{prefix}StateTypeId_v2", "type_info": f"{prefix}StateTypeInfo_v2"}
    kind = {field: capsule(name, called=True) for field, name in state.items()}
    jax.ffi.register_ffi_type(f"{prefix}Types_v2", kind, platform="CUDA")
    stages = ("instantiate", "prepare", "execute")
    handlers = {stage: capsule(f"{prefix}{stage.capitalize()}_v2", called=False) for stage in stages}
    jax.ffi.register_ffi_target(TARGETS["cutlass_call"], handlers, platform="CUDA")


def register_cutile_call() -> None:
    importlib.import_module("cuda.tile.jax")  # registers its handler


REGISTER: dict[str, Callable[[], None]] = {
    "ours": lambda: None,  # cudnn_jax is a plugin of JAX
    "cutlass_call": register_cutlass_call,
    "cutile_call": register_cutile_call,
}


def run(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Microseconds that one call costs, by kind of step: ours, the peer's, and their ratio within each round."""
    rows = []
    for kind, calls in PAIRS.items():
        arguments = [jnp.full(each.shape, 0.5, each.dtype) for each in operands(kind)]
        compiled, answers = {}, {}
        for call in calls:
            try:
                REGISTER[call]()
                for length in LENGTHS:
                    loaded = export.deserialize(bytearray((folder / f"{kind}-{call}-{length}.bin").read_bytes()))
                    made = jax.jit(loaded.call).lower(*arguments).compile()
                    answers[call, length] = np.asarray(made(*arguments), np.float32)
                    compiled[call, length] = made
            except (ImportError, jax.errors.JaxRuntimeError) as error:
                rows.append({"kind": kind, "call": call, "left_out": harness.one_line(error)})
        effort = harness.Effort(rounds=rounds, slow_factor=float("inf"))
        named = {f"{call} {length}": fn for (call, length), fn in compiled.items()}
        timings = harness.interleave(named, arguments, effort, seed=0)
        short, long = LENGTHS
        cost = {}
        for call in calls:
            if (call, long) in compiled:
                spread = timings[f"{call} {long}"].rounds - timings[f"{call} {short}"].rounds
                cost[call] = harness.Timing(1e3 * spread / (long - short))
                rows.append({"kind": kind, "call": call, "us": cost[call].ms, "spread": cost[call].spread})
        if len(cost) == 2:
            ratio, spread = cost[calls[0]].ratio_to(cost[calls[1]])
            same = all(np.array_equal(answers[calls[0], n], answers[calls[1], n]) for n in LENGTHS)
            rows.append({"kind": kind, "peer over ours": ratio, "spread": spread, "equal bits": same})
    return rows


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers_call", description=__doc__)
    parser.add_argument("what", choices=("export", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder for the JSON of `run` (default benchmarks/results/<device>)")
    args = parser.parse_args(argv)
    if args.what == "export":
        write(args.folder)
        return 0
    rows = run(args.folder, args.rounds)
    for row in rows:
        print(json.dumps(row))
    print(f"written to {report.write_json('peers_call', {'rows': rows, 'rounds': args.rounds}, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
