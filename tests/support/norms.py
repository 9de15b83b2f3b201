"""RMS norm cases: graphs, random arrays, and the float64 answer that every engine is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from cudnn_jax.engines.planning import pygraph
from cudnn_jax.graph import data_type
from cudnn_jax.graph.layout import row_major

Arrays = dict[str, np.ndarray]
TOLERANCE = {"bfloat16": 5e-3, "float16": 1.25e-3, "float32": 5e-6}
GRADIENT_TOLERANCE = {"bfloat16": 1.5e-2, "float16": 4e-3, "float32": 3e-5}


@dataclass(frozen=True)
class Case:
    """An input of `dim` normalised over `axes`. `weights` is the type of scale and bias, the input's if absent."""

    dim: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str = "float32"
    weights: str = ""
    scale: bool = True
    bias: bool = False
    statistics: bool = True
    epsilon: float = 1e-5

    def __str__(self) -> str:
        words = ["x".join(map(str, self.dim)), "over", "".join(map(str, self.axes)), self.dtype, self.weights]
        words += [word for word, said in (("unscaled", not self.scale), ("bias", self.bias)) if said]
        return "-".join(word for word in (*words, "" if self.statistics else "inference") if word)

    @property
    def weight_dim(self) -> tuple[int, ...]:
        return tuple(size if axis in self.axes else 1 for axis, size in enumerate(self.dim))

    @property
    def statistics_dim(self) -> tuple[int, ...]:
        return tuple(1 if axis in self.axes else size for axis, size in enumerate(self.dim))

    def forward(self) -> pygraph:
        """Inputs x, then scale and bias where the case has them; outputs Y, then inv_var."""
        graph = pygraph(io_data_type=self.dtype)
        x = graph.tensor(self.dim, name="x")
        scale, bias = self._weight(graph, "scale", self.scale), self._weight(graph, "bias", self.bias)
        phase = "TRAINING" if self.statistics else "INFERENCE"
        _give(graph.rmsnorm(x, scale, bias, self.epsilon, phase))
        return graph

    def backward(self) -> pygraph:
        """Inputs grad, x, scale, inv_variance; outputs DX, DScale, DBias, where the case has them."""
        graph = pygraph(io_data_type=self.dtype)
        grad, x = graph.tensor(self.dim, name="grad"), graph.tensor(self.dim, name="x")
        scale = self._weight(graph, "scale", self.scale)
        inv_variance = graph.tensor(self.statistics_dim, data_type=data_type.FLOAT, name="inv_variance")
        made = graph.rmsnorm_backward(grad, x, scale, inv_variance, has_dbias=self.bias)
        for tensor in made[1:]:
            if tensor is not None:
                tensor.set_data_type(self.weights or self.dtype)
        _give(made)
        return graph

    def _weight(self, graph: pygraph, name: str, there: bool) -> Any:
        dim = self.weight_dim
        return graph.tensor(dim, row_major(dim), self.weights or self.dtype, name) if there else None

    def draw(self, rng: np.random.Generator) -> Arrays:
        """x, scale, bias and grad: unit normal, scale about 1, x of another size in each row."""
        size = 10 ** rng.uniform(-1, 1, self.statistics_dim)
        made = {
            "x": rng.standard_normal(self.dim) * size,
            "scale": 1 + 0.5 * rng.standard_normal(self.weight_dim),
            "bias": rng.standard_normal(self.weight_dim),
            "grad": rng.standard_normal(self.dim),
        }
        types = {"x": self.dtype, "grad": self.dtype}
        return {
            name: array.astype(jnp.dtype(types.get(name, self.weights or self.dtype))) for name, array in made.items()
        }

    def forward_inputs(self, drawn: Arrays) -> list[np.ndarray]:
        names = ["x"] + ["scale"] * self.scale + ["bias"] * self.bias
        return [drawn[name] for name in names]

    def backward_inputs(self, drawn: Arrays) -> list[np.ndarray]:
        statistics = self.expected(drawn)["inv_var"].astype(np.float32)
        return [drawn["grad"], drawn["x"], *([drawn["scale"]] if self.scale else []), statistics]

    def expected(self, drawn: Arrays) -> Arrays:
        """The answer in float64. The gradients are those of sum(grad * Y), by differentials rather than by the kernel's formula."""
        x, grad = (drawn[name].astype(np.float64) for name in ("x", "grad"))
        scale = drawn["scale"].astype(np.float64) if self.scale else np.ones(self.weight_dim)
        bias = drawn["bias"].astype(np.float64) if self.bias else np.zeros(self.weight_dim)
        count = np.prod([self.dim[axis] for axis in self.axes])
        kept = tuple(axis for axis in range(len(self.dim)) if axis not in self.axes)
        mean = np.sum(x**2, self.axes, keepdims=True) / count
        inverse = (mean + self.epsilon) ** -0.5
        d_normal = grad * scale
        d_inverse = np.sum(d_normal * x, self.axes, keepdims=True)
        d_mean = d_inverse * -0.5 * (mean + self.epsilon) ** -1.5
        return {
            "Y": x * inverse * scale + bias,
            "inv_var": inverse,
            "DX": d_normal * inverse + d_mean * 2 * x / count,
            "DScale": np.sum(grad * x * inverse, kept, keepdims=True),
            "DBias": np.sum(grad, kept, keepdims=True),
        }

    def check(self, names: list[str], got: Any, drawn: Arrays) -> None:
        """Compares results by name with the answer; an empty result has only its shape to compare."""
        want = self.expected(drawn)
        assert len(got) == len(names)
        for name, array in zip(names, got, strict=True):
            dtype = "float32" if name == "inv_var" else str(array.dtype)
            assert array.shape == want[name].shape
            table = TOLERANCE if name in ("Y", "inv_var") else GRADIENT_TOLERANCE
            error = _relative_error(np.asarray(array).astype(np.float64), want[name], self._natural(name, want, drawn))
            assert error <= table[dtype], f"{name}: relative error {error}, at most {table[dtype]}"

    def _natural(self, name: str, want: Arrays, drawn: Arrays) -> float:
        """The norm that inputs of this scale give; DX is a difference, which in short rows cancels almost whole."""
        if name != "DX":
            return float(want[name].size ** 0.5)
        scale = drawn["scale"].astype(np.float64) if self.scale else 1.0
        return 10 * float(np.linalg.norm(drawn["grad"].astype(np.float64) * scale * want["inv_var"]))

    @property
    def forward_names(self) -> list[str]:
        return ["Y"] + ["inv_var"] * self.statistics

    @property
    def backward_names(self) -> list[str]:
        return ["DX"] + ["DScale"] * self.scale + ["DBias"] * self.bias


def _give(tensors: Any) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.set_output(True)


def _relative_error(got: np.ndarray, want: np.ndarray, natural: float) -> float:
    if not want.size:
        return 0.0
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-2 * natural))
