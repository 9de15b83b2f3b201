"""The kernel of residual + gelu(x + bias): one pass, 16 bytes a load and store.

The matrix is taken as rows * cols elements in a line, cut into vectors of 16 bytes, so that a row need not be whole
vectors. `vectors` slabs of whole rows lie behind one another, and a thread works at the same place of each: its columns
are the same in all of them, so bias is read once, and the loads of all slabs are in flight together.
"""

import math
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from cudnn_jax.engines import cutedsl
from cudnn_jax.engines.pointwise.bias_gelu import BiasGelu

VECTOR_BYTES = 16


def width(problem: BiasGelu) -> int:
    """Elements of a vector."""
    return VECTOR_BYTES * 8 // problem.dtype.itemsize_bits


def slab_length(problem: BiasGelu, vectors: int) -> int:
    """Vectors of a slab: `vectors` slabs hold all rows, and each begins with a row and with a vector."""
    group = width(problem) // math.gcd(width(problem), problem.cols)
    rows = math.ceil(problem.rows / (vectors * group)) * group
    return rows * problem.cols // width(problem)


def erf_gelu(h: Any) -> Any:
    return h * (0.5 + 0.5 * cute.math.erf(h * math.sqrt(0.5)))


def tanh_gelu(h: Any) -> Any:
    # (1 + tanh(u)) / 2 = 1 / (1 + 2^(-2 log2(e) u)), u = sqrt(2 / pi) (h + 0.044715 h^3)
    scale = -2 * math.log2(math.e) * math.sqrt(2 / math.pi)
    power = cute.math.exp2(h * (scale + (scale * 0.044715) * (h * h)), fastmath=True)
    return h * cute.math.rcp(1.0 + power, fastmath=True)


def function(problem: BiasGelu, threads: int, vectors: int) -> Any:
    """The host function: takes the addresses of x, bias, residual, pre and out, those that exist, and the stream."""
    element = cutedsl.element_type(problem.dtype)
    gelu = erf_gelu if problem.approximation == "erf" else tanh_gelu
    names = [name for name in ("x", "bias", "residual", "pre", "out") if name in problem.dtypes]
    V, cols, total = width(problem), problem.cols, problem.rows * problem.cols
    slab = slab_length(problem, vectors)
    whole, rest = total // V, total % V  # vectors, and elements behind the last
    period = cols // math.gcd(V, cols)  # vectors after which the columns of a vector repeat
    used = [k for k in range(vectors) if k * slab < whole]
    Index = Int32 if total < 2**31 else Int64

    def combined(x: Any, bias: Any, residual: Any) -> tuple[Any, Any]:
        """(pre, out) of values in the element type; those that are None are absent."""
        pre = x.to(Float32) if bias is None else x.to(Float32) + bias.to(Float32)
        if "pre" in names:
            pre = pre.to(element)
        out = gelu(pre.to(Float32))
        if residual is not None:
            out = out + residual.to(Float32)
        return pre, out.to(element)

    def in_vectors(line: Any) -> Any:
        return cute.make_tensor(line.iterator, cute.make_layout((V, cute.size(line) // V)))

    def bias_of(line: Any, t: Any) -> Any:
        """The bias of the columns of vector `t`."""
        first = t % period * V
        if cols % V == 0:
            return in_vectors(line)[None, first // V].load()
        made = cute.make_rmem_tensor((V,), element)
        for i in range(V):
            made[i] = line[(first + i) % cols]
        return made.load()

    def vector_part(lines: dict[str, Any], t: Any) -> None:
        cut = {name: in_vectors(line) for name, line in lines.items() if name != "bias"}
        places = [Index(t) + k * slab for k in used]
        inside = [(k + 1) * slab <= whole for k in used]
        # Behind the end a thread reads the last vector again, and writes nothing.
        reads = [at if known else cutlass.min(at, Index(whole - 1)) for at, known in zip(places, inside, strict=True)]
        xs = [cut["x"][None, at].load() for at in reads]
        residuals = [cut["residual"][None, at].load() if "residual" in names else None for at in reads]
        bias = bias_of(lines["bias"], t) if "bias" in names else None
        for at, known, x, residual in zip(places, inside, xs, residuals, strict=True):
            pre, out = combined(x, bias, residual)
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
        pre, out = combined(lines["x"][at], bias, residual)
        if "pre" in names:
            lines["pre"][at] = pre
        lines["out"][at] = out

    @cute.kernel
    def kernel(operands: Any) -> None:
        lines = dict(zip(names, operands, strict=True))
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        t = block * threads + thread
        if cutlass.const_expr(whole > 0):
            if cutlass.const_expr(slab % threads == 0):
                vector_part(lines, t)
            else:
                if t < slab:
                    vector_part(lines, t)
        if cutlass.const_expr(rest > 0):
            if t < rest:
                scalar_part(lines, Index(t) + (total - rest))

    @cute.jit
    def bias_gelu(*operands: Any) -> None:
        lengths = [cols if name == "bias" else total for name in names]
        lines = [
            cute.make_tensor(address, cute.make_layout(length))
            for address, length in zip(operands[:-1], lengths, strict=True)
        ]
        kernel(lines).launch(grid=(math.ceil(slab / threads), 1, 1), block=(threads, 1, 1), stream=operands[-1])

    return bias_gelu
