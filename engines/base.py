"""What an engine is, and what it makes.

An engine is one file that implements `BaseEngine`. It never ranks itself and never runs at call time: it accepts or
declines a graph, and builds an artifact for it while the caller's function is being compiled.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, Tensor, pygraph

DECLINES = (NotImplementedError, GraphNotSupportedError, ImportError)
"""The only exceptions by which an engine declines. Anything else is a bug and propagates."""


class TransientDecline(NotImplementedError):
    """A decline of the moment, such as a compiler that ran out of time: what is planned without it is not kept."""


@dataclass(frozen=True)
class PlanConfig:
    """One entry of the plan list. Its identity is (engine_id, knobs); the rest describes it.

    Attributes:
      engine_id: a number of the flat space in `ids`.
      knobs: concrete (name, value) pairs in the engine's own order.
      engine: the engine's name, such as "cudnn" or "xla".
      kind: what it is made with: "cudnn", "cutedsl", "cutile", "xla" or "test".
      mode: the heuristic mode that produced the entry.
      workspace: bytes of scratch memory, None before the plan is built.
      notes: names of `engines.notes` that hold of it.
    """

    engine_id: int
    knobs: tuple[tuple[str, int], ...] = ()
    engine: str = field(default="", compare=False)
    kind: str = field(default="", compare=False)
    mode: str | None = field(default=None, compare=False)
    workspace: int | None = field(default=None, compare=False)
    notes: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def name(self) -> str:
        """A name that `implementation=` takes, such as "cudnn/4:k2=1,k24=0" or "xla"."""
        knobs = ",".join(f"{key}={value}" for key, value in self.knobs)
        number = f"/{self.engine_id}" if self.engine == "cudnn" else ""
        return f"{self.engine}{number}" + (f":{knobs}" if knobs else "")


@dataclass(frozen=True)
class Decline:
    """Why an engine or a plan is not used: one line."""

    engine: str
    reason: str


@dataclass(frozen=True)
class Inline:
    """An artifact that lowering inlines into the caller's program.

    `fn` takes arrays with the logical dims of `graph.inputs`, in that order, and returns a tuple in the order of
    `graph.outputs`.

    Attributes:
      any_strides: `graph.execute` takes each buffer with its own strides; its dims are the tensor's.
    """

    fn: Callable[..., tuple[Any, ...]]
    any_strides: ClassVar[bool] = True


@dataclass(frozen=True)
class Program:
    """An artifact that the XLA handler runs: self-contained bytes in the layout of `_ffi.PROGRAM_SPEC`.

    Its operands are the graph's inputs, unless `prepare` makes them of these.

    Attributes:
      prepare: takes arrays as `Inline.fn` does and returns those of `operands`, in their logical dims and order.
        Lowering inlines it in front of the custom call.
      operands: the tensors whose arrays `prepare` returns.
      notes: copies that could not be avoided, for people.
      any_strides: not so: sizes and strides are built into a program, and buffers with others are refused.
    """

    data: bytes
    workspace: int
    sha256: str
    prepare: Callable[..., tuple[Any, ...]] | None = field(default=None, compare=False)
    operands: tuple[Tensor, ...] = field(default=(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    any_strides: ClassVar[bool] = False


@dataclass(frozen=True)
class Derived:
    """A frozen graph to ask the backend for in place of the user's: other inputs, the same outputs in the same order.

    `prepare` and `notes` are those of the programs made of it.
    """

    graph: pygraph
    prepare: Callable[..., tuple[Any, ...]]
    notes: tuple[str, ...] = ()

    def attach(self, program: Program) -> Program:
        """A program of the derived graph, for the user's graph."""
        return replace(program, prepare=self.prepare, operands=tuple(self.graph.inputs), notes=self.notes)


Artifact = Inline | Program


class BaseEngine(abc.ABC):
    """One way to run the graphs of a family.

    Subclasses set `name` (what a user may write as `implementation=`) and `kind` ("cudnn", "cutedsl", "cutile", "xla"
    or "test"), and `notes`, the names of `engines.notes` that hold of its plans. The manifest hands an engine its id;
    an engine never claims one.
    """

    name: str
    kind: str
    notes: frozenset[str] = frozenset()

    def __init__(self, engine_id: int) -> None:
        self.engine_id = engine_id

    @abc.abstractmethod
    def configs(self, graph: pygraph, facts: Any, target: Target) -> Sequence[tuple[tuple[str, int], ...]]:
        """Knob settings this engine can build for the graph, any order. Declines by raising one of `DECLINES`.

        Every plan of the engine is one of these, also where a plan is asked for by its identity.

        Loads no DSL: whether one is installed is looked up with `importlib.util.find_spec`.
        """

    @abc.abstractmethod
    def build_plan(self, graph: pygraph, facts: Any, config: PlanConfig, target: Target) -> Artifact:
        """The expensive step, once for each graph and plan. Declines by raising one of `DECLINES`."""
