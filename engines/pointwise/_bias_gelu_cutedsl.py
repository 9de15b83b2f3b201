"""The kernel of residual + gelu(x + bias): one pass, 16 bytes a load and store.

The matrix is a line of vectors in slabs of whole rows (`slabs`), so that a row need not be whole vectors. A thread
works at the same place of each slab: its columns are the same in all of them, so bias is read once, and the loads of
all slabs are in flight together.
"""

# mypy: disallow-untyped-decorators=False
import math
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from cudnn_jax.engines import cutedsl
from cudnn_jax.engines.pointwise.bias_gelu import BiasGelu
from cudnn_jax.engines.pointwise.slabs import Slabs


def erf_gelu(h: Any) -> Any:
    return h * (0.5 + 0.5 * cute.math.erf(h * math.sqrt(0.5)))


_TAIL = (
    1.1511943340301514,
    0.45862793922424316,
    0.05376887321472168,
    -0.008399777114391327,
    0.0008993763476610184,
    -5.723103095078841e-05,
    1.600068571860902e-06,
)
"""Of the normal distribution: Phi(-u) = 2^-(1 + u p(u)) for u >= 0, p given by its coefficients from the lowest.

Good to 4e-6 of the value for u <= 3 and to 1.5e-4 for u <= 6; the notes have how it was fitted.
"""


def tail_gelu(h: Any) -> Any:
    u = cute.math.abs(h)
    power = Float32(_TAIL[-1])
    for coefficient in _TAIL[-2::-1]:
        power = power * u + coefficient
    tail = _exp2(-(power * u + 1.0))
    return h * cutlass.cutlass_dsl.select_(h < 0.0, tail, 1.0 - tail)


def tanh_gelu(h: Any) -> Any:
    # (1 + tanh(v)) / 2 = 1 / (1 + 2^(-2 log2(e) v)), v = sqrt(2 / pi) (h + 0.044715 h^3)
    scale = -2 * math.log2(math.e) * math.sqrt(2 / math.pi)
    return h * cute.arch.rcp_approx(1.0 + _exp2(h * (scale + (scale * 0.044715) * (h * h))))


def _exp2(x: Any) -> Any:
    return cute.math.exp2(x, approx=True, ftz=True)


_GELU = {("erf", 0): erf_gelu, ("erf", 1): tail_gelu, ("tanh", 0): tanh_gelu}
"""(approximation, the knob `tail`) -> the function, of one float32."""


def function(problem: BiasGelu, threads: int, vectors: int, tail: int = 0) -> Any:
    """The host function: takes the addresses of x, bias, residual, pre and out, those that exist, and the stream."""
    element = cutedsl.element_type(problem.dtype)
    gelu = _GELU[problem.approximation, tail]
    names = [name for name in ("x", "bias", "residual", "pre", "out") if name in problem.dtypes]
    slabs = Slabs.of(problem, vectors)
    V, cols, total, whole = slabs.width, problem.cols, problem.rows * problem.cols, slabs.whole
    Index = Int64 if slabs.wide else Int32

    def on_vector(h: Any) -> Any:
        made = cute.make_rmem_tensor((V,), Float32)
        for i in range(V):
            made[i] = gelu(h[i])
        return made.load()

    def combined(activation: Any, x: Any, bias: Any, residual: Any) -> tuple[Any, Any]:
        """(pre, out) of values in the element type, vectors or single ones; those that are None are absent."""
        pre = x.to(Float32) if bias is None else x.to(Float32) + bias.to(Float32)
        if "pre" in names:
            pre = pre.to(element)
        out = activation(pre.to(Float32))
        if residual is not None:
            out = out + residual.to(Float32)
        return pre, out.to(element)

    def in_vectors(line: Any) -> Any:
        return cute.make_tensor(line.iterator, cute.make_layout((V, cute.size(line) // V)))

    def bias_of(line: Any, t: Any) -> Any:
        """The bias of the columns of vector `t`."""
        first = t % slabs.period * V
        if cols % V == 0:
            return in_vectors(line)[None, first // V].load()
        made = cute.make_rmem_tensor((V,), element)
        for i in range(V):
            made[i] = line[(first + i) % cols]
        return made.load()

    def vector_part(lines: dict[str, Any], t: Any) -> None:
        cut = {name: in_vectors(line) for name, line in lines.items() if name != "bias"}
        starts = [k * slabs.length for k in range(slabs.count)]
        places = [t + start for start in starts]
        inside = [start + slabs.threads <= whole for start in starts]
        # Behind the end a thread reads the last vector again, and writes nothing.
        reads = [at if known else cutlass.min(at, Index(whole - 1)) for at, known in zip(places, inside, strict=True)]
        xs = [cut["x"][None, at].load() for at in reads]
        residuals = [cut["residual"][None, at].load() if "residual" in names else None for at in reads]
        bias = bias_of(lines["bias"], t) if "bias" in names else None
        for at, known, x, residual in zip(places, inside, xs, residuals, strict=True):
            pre, out = combined(on_vector, x, bias, residual)
            write(cut, at, pre, out, known)

    @cute.jit
    def write(cut: Any, at: Any, pre: Any, out: Any, known: cutlass.Constexpr) -> None:
        if cutlass.const_expr(known):
            store(cut, at, pre, out)
        else:
            if at < whole:
                store(cut, at, pre, out)

    def store(cut: Any, at: Any, pre: Any, out: Any) -> None:
        if "pre" in names:
            cut["pre"][None, at].store(pre)
        cut["out"][None, at].store(out)

    def scalar_part(lines: dict[str, Any], at: Any) -> None:
        bias = lines["bias"][at % cols] if "bias" in names else None
        residual = lines["residual"][at] if "residual" in names else None
        pre, out = combined(gelu, lines["x"][at], bias, residual)
        if "pre" in names:
            lines["pre"][at] = pre
        lines["out"][at] = out

    @cute.kernel
    def kernel(operands: Any) -> None:
        lines = dict(zip(names, operands, strict=True))
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        t = Index(block) * threads + thread
        if cutlass.const_expr(slabs.threads % threads == 0 and whole > 0):
            vector_part(lines, t)
        elif cutlass.const_expr(whole > 0):
            if t < slabs.threads:
                vector_part(lines, t)
        if cutlass.const_expr(slabs.rest > 0):
            if t < slabs.rest:
                scalar_part(lines, t + (total - slabs.rest))

    # What profilers and the table of images show; the DSL's own name spells out every argument's layout.
    kernel.set_name_prefix("bias_gelu", remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def bias_gelu(*operands: Any) -> None:
        lengths = [cols if name == "bias" else total for name in names]
        lines = [
            cute.make_tensor(address, cute.make_layout(length))
            for address, length in zip(operands[:-1], lengths, strict=True)
        ]
        kernel(lines).launch(grid=(slabs.blocks(threads), 1, 1), block=(threads, 1, 1), stream=operands[-1])

    return bias_gelu
