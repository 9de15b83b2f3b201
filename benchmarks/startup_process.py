"""One process of `python -m benchmarks startup`: prints milliseconds by name. What is timed is imported only then."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

OPERATIONS = 8
FIRST = ", first call"


def milliseconds(fn: Callable[[], Any]) -> float:
    began = time.perf_counter()
    fn()
    return (time.perf_counter() - began) * 1e3


def first_and_later(name: str, fn: Callable[[], Any], repeats: int) -> dict[str, float]:
    first = milliseconds(fn)
    return {name + FIRST: first, name: statistics.median(milliseconds(fn) for _ in range(repeats))}


def importing() -> dict[str, float]:
    import jax  # noqa: F401

    def load() -> None:
        import cudnn_jax  # noqa: F401

    def use() -> None:
        import cudnn_jax

        _ = cudnn_jax.sdpa

    return {"import": milliseconds(load), "import" + FIRST: milliseconds(use)}


def ranking(target: Any) -> dict[str, float]:
    """A pointwise graph, described and ranked by its Python engines."""
    import cudnn_jax

    sizes = itertools.count(1)

    def rank() -> None:
        graph = cudnn_jax.pygraph(io_data_type="bfloat16")
        x, bias = graph.tensor((64 * next(sizes), 4096)), graph.tensor((1, 4096))
        graph.gelu(graph.bias(x, bias)).set_output(True)
        graph.create_execution_plans(target=target, implementation="cutedsl")
        assert graph.plans

    return first_and_later("rank, Python engines", rank, 20)


def attention(q: Any, k: Any, v: Any) -> Any:
    import cudnn_jax

    return cudnn_jax.sdpa(q, k, v, is_causal=True)


def empty(q: Any, k: Any, v: Any) -> Any:
    import jax

    return jax.ffi.ffi_call("empty", jax.ShapeDtypeStruct(q.shape, q.dtype))(q, k, v)


def operands(length: int) -> list[Any]:
    import jax

    return [jax.ShapeDtypeStruct((2, length, 4, 64), "bfloat16")] * 3


def tracing(ahead: Callable[[], contextlib.AbstractContextManager[None]]) -> dict[str, float]:
    """Tracing and lowering, less what custom calls without any content cost."""
    import jax

    def lower(call: Callable[..., Any], lengths: list[int]) -> float:
        def run(*arrays: Any) -> list[Any]:
            return [call(*arrays[3 * at : 3 * at + 3]) for at in range(len(lengths))]

        arrays = [each for length in lengths for each in operands(length)]
        with ahead():
            return milliseconds(lambda: jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)))

    lower(empty, [32])  # what JAX does once is not ours
    name, rest = "trace that hits the cache, per operation", [128 * at for at in range(1, OPERATIONS + 1)]
    first = {call: lower(call, [64]) for call in (empty, attention)}
    later = {call: lower(call, rest) for call in (empty, attention)}
    return {name + FIRST: first[attention] - first[empty], name: (later[attention] - later[empty]) / OPERATIONS}


def planned_here() -> int:
    """How many operations were not found in the cache."""
    from cudnn_jax.engines import planning

    return sum(planned.origin == planning.Planned.origin for planned in planning._memo.values())


def planning(target: Any) -> dict[str, float]:
    """cuDNN's first plan of attention, built, with no cache asked."""
    from cudnn_jax._sites import sites
    from cudnn_jax.engines.planner import Planner, Request
    from cudnn_jax.engines.planning import DEFAULT_MODES

    lengths: Iterator[int] = itertools.count(1024, 128)

    def plan() -> None:
        (site,) = sites(attention, *operands(next(lengths)))
        graph = site.graph()
        graph.freeze()
        planner = Planner(graph, Request(target, DEFAULT_MODES, "cudnn"))
        planner.build(planner.first())

    return first_and_later("cold cuDNN plan", plan, 5)


def main() -> None:
    took = importing()
    import jax

    from cudnn_jax import _target, aot
    from cudnn_jax.engines.target import named

    gpu = any(device.platform == "gpu" for device in jax.devices())
    target = _target.current() if gpu else named("h200")
    took |= ranking(target)
    took |= tracing(contextlib.nullcontext if gpu else lambda: aot.target("h200"))
    missed = planned_here()
    took |= planning(target)
    print(json.dumps({"missed": missed, "took": took}))


if __name__ == "__main__":
    main()
