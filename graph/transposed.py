"""A node while reverse mode passes it: what an operation's `derivative` is handed, and computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from cudnn_jax.graph.call import restore
from cudnn_jax.graph.canonical import given_params
from cudnn_jax.graph.layout import Dims
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.pygraph import pygraph
    from cudnn_jax.graph.tensor import Tensor


class Source(Protocol):
    """Where a rule's values come from."""

    def value(self, tensor: Tensor) -> Tensor:
        """A tensor of the forward, in the backward."""

    def view(self, tensor: Tensor, order: tuple[int, ...]) -> Tensor | None:
        """What the caller gives for a tensor of the backward, its axes in another order; None of what a node makes."""


FLOATS = frozenset({data_type.FLOAT, data_type.DOUBLE, data_type.HALF, data_type.BFLOAT16})
"""The types to compute gradients in."""


class Transposed:
    """A node of the forward, whose outputs have cotangents.

    A cotangent may be narrow: 1 long along an axis where it is the same all along, as that of a sum's input is.
    Pointwise nodes broadcast it; `full` spreads it for operations that do not.

    Attributes:
      graph: the backward.
      node: the forward's.
      wanted: the input ports whose gradients are wanted.
      compute: the type that the node computes in.
      source: of values.
    """

    def __init__(
        self,
        graph: pygraph,
        node: Node,
        wanted: tuple[str, ...],
        cotangents: Mapping[str, Tensor],
        source: Source,
    ) -> None:
        self.graph = graph
        self.node = node
        self.wanted = wanted
        own, whole = node.compute_data_type, node._graph.compute_data_type
        self.compute = whole if own is data_type.NOT_SET else own
        self._cotangents = cotangents
        self.source = source

    def __getitem__(self, port: str) -> Term:
        """The forward's value at a port."""
        return Term(self, self.source.value(self._tensor(port)))

    def _tensor(self, port: str) -> Tensor:
        return {**self.node.inputs, **self.node.outputs}[port]

    @property
    def ct(self) -> Term:
        """The cotangent of the only output; it may be narrow."""
        (port,) = self.node.outputs
        return Term(self, self._cotangents[port])

    def cotangent(self, port: str) -> Term | None:
        """The cotangent of an output, which may be narrow; None is 0."""
        return Term(self, self._cotangents[port]) if port in self._cotangents else None

    def full(self, port: str) -> Term:
        """The cotangent of an output in its dims."""
        given = self.cotangent(port)
        return self[port].zeros() if given is None else self.spread(given, port)

    def spread(self, term: Term, port: str) -> Term:
        """A narrow term in the dims of a port."""
        # A choice between two equal things takes the dims of the condition, whatever that is.
        return term if term.dim == self._tensor(port).dim else self[port].mode("cmp_eq", self[port]).where(term, term)

    def fold(self, term: Term, port: str, whole: Dims | None = None) -> Term:
        """The sum over axes along which an input is broadcast, in its dims.

        Args:
          term: what belongs to each element of `whole`; narrow, it stands for as many.
          whole: the dims to which the input is broadcast; those of the only output if absent.
        """
        if whole is None:
            (made,) = self.node.outputs.values()
            whole = made.dim
        dim = self.node.inputs[port].dim
        aligned = (1,) * (len(whole) - len(dim)) + dim
        summed = [axis for axis, size in enumerate(aligned) if size == 1 != whole[axis]]
        term = term.total(1 if axis in summed else size for axis, size in enumerate(term.dim)) * float(
            prod(whole[axis] for axis in summed if term.dim[axis] == 1)
        )
        return term.reshaped(term.dim[len(whole) - len(dim) :])

    @property
    def options(self) -> dict[str, Any]:
        """The node's parameters that the caller gave."""
        fixed = self.node.operation.fixed
        return {name: value for name, value in given_params(self.node).items() if name not in fixed}

    def add(self, operation: str, *operands: Term | float, **options: Any) -> Any:
        """A node of the backward: the tensor that it makes, or the tuple of those."""
        terms = [each for each in operands if isinstance(each, Term)]
        rank = len(terms[0].dim)
        tensors = [each.tensor if isinstance(each, Term) else self._number(each, rank) for each in operands]
        return getattr(self.graph, operation)(
            *tensors, **options, compute_data_type=self.node.compute_data_type, name=self.node.name
        )

    def term(self, operation: str, *operands: Term | float, **options: Any) -> Term:
        """A node of the backward with one output."""
        return Term(self, self.add(operation, *operands, **options))

    def _number(self, value: float, rank: int) -> Tensor:
        return self.graph.scalar(value, self.compute, rank=rank)

    def backward_node(
        self,
        name: str,
        ports: Mapping[str, Term],
        without: Sequence[str] = (),
        made: Mapping[str, Tensor] | None = None,
    ) -> Mapping[str, Term]:
        """The node of the operation that is this one's backward, its outputs by port.

        Ports and attributes that both operations have are handed on.

        Args:
          ports: what is wired beside them.
          without: ports and attributes of the forward that the backward does without. Any other one that it does not
            have, is refused.
          made: outputs that the caller makes.
        """
        from cudnn_jax.graph.builders import OPERATIONS  # the tables name the rules that call this

        operation = OPERATIONS[name]
        takes = {port.name for port in operation.inputs}
        options = self.options
        known = {*takes, *(attribute.name for attribute in operation.attributes), *without}
        for key in (*self.node.inputs, *options):
            if key not in known:
                self.refuse(f"{name} takes no {key}")
        wired = {port: self[port].tensor for port in self.node.inputs if port in takes and port not in ports}
        wired |= {port: term.tensor for port, term in ports.items()}
        options = {key: value for key, value in options.items() if key not in without}
        call = restore(operation, self.node.name, self.node.compute_data_type, wired, made or {}, options)
        placed = self.graph._place(operation, call)
        return {port: Term(self, tensor) for port, tensor in placed.outputs.items()}

    def refuse(self, why: str = "") -> NoReturn:
        raise NotImplementedError(f"{self.node.label} has no derivative{': ' + why if why else ''}")


class Term:
    """A tensor of the backward: operators, and pointwise operations by their names, add nodes."""

    __slots__ = ("_rule", "tensor")

    def __init__(self, rule: Transposed, tensor: Tensor) -> None:
        self._rule = rule
        self.tensor = tensor

    @property
    def dim(self) -> Dims:
        return self.tensor.dim

    def mode(self, name: str, *others: Term | float, **options: Any) -> Term:
        """A pointwise operation of this and others."""
        return self._rule.term(name, self, *others, **options)

    def __getattr__(self, name: str) -> Callable[..., Term]:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self.mode, name)

    def __neg__(self) -> Term:
        return self.mode("neg")

    def __add__(self, other: Term | float) -> Term:
        return self.mode("add", other)

    def __radd__(self, other: float) -> Term:
        return self.mode("add", other)

    def __sub__(self, other: Term | float) -> Term:
        return self.mode("sub", other)

    def __rsub__(self, other: float) -> Term:
        return self._rule.term("sub", other, self)

    def __mul__(self, other: Term | float) -> Term:
        return self if other == 1.0 else self.mode("mul", other)

    def __rmul__(self, other: float) -> Term:
        return self * other

    def __truediv__(self, other: Term | float) -> Term:
        return self.mode("div", other)

    def through(self, backward: str, x: Term) -> Term:
        """This cotangent through a pointwise backward at x, with the node's own options."""
        return self.mode(backward, x, **self._rule.options)

    def where(self, yes: Term | float, no: Term | float) -> Term:
        """`yes` where this is true, `no` elsewhere."""
        producer = self.tensor.producer
        if producer is not None and producer.params.get("mode", "").startswith("cmp_"):
            self.tensor.set_data_type(data_type.BOOLEAN)
        return self._rule.term("binary_select", yes, no, self)

    def typed(self, kind: data_type) -> Term:
        """In another data type."""
        if self.tensor.data_type is kind:
            return self
        made = self.mode("identity")
        made.tensor.set_data_type(kind)
        return made

    def zeros(self) -> Term:
        """As many zeros, whatever this holds."""
        return self.where(0.0, 0.0)

    def sign(self) -> Term:
        """1 above 0, -1 below, 0 at 0."""
        return self.mode("cmp_gt", 0.0) - self.mode("cmp_lt", 0.0)

    def total(self, dim: Any, mode: str = "ADD") -> Term:
        """Folded along the axes where `dim` is 1."""
        dim = tuple(dim)
        if dim == self.dim:
            return self
        made = self.mode("reduction", mode=mode)
        made.tensor.set_dim(dim)
        return made

    def reshaped(self, dim: Any) -> Term:
        """Under other dims."""
        dim = tuple(dim)
        if dim == self.dim:
            return self
        made = self.mode("reshape", reshape_mode="LOGICAL")
        made.tensor.set_dim(dim)
        return made

    def permuted(self, order: Any) -> Term:
        """With the axes in another order."""
        # Not every cuDNN has the operation; what the caller gives needs none.
        view = self._rule.source.view(self.tensor, tuple(order))
        return self.mode("transpose", permutation=tuple(order)) if view is None else Term(self._rule, view)

    def flipped(self) -> Term:
        """With the last two axes swapped."""
        *rest, rows, columns = range(len(self.dim))
        return self.permuted((*rest, columns, rows))

    def sliced(self, bounds: Mapping[int, tuple[int, int]]) -> Term:
        """The part from start to stop of some axes."""
        whole = {axis: (0, size) for axis, size in enumerate(self.dim)}
        if whole == whole | dict(bounds):
            return self
        return self.mode("slice", slices=[(whole | dict(bounds))[axis] for axis in whole])

    def joined(self, axis: int, *others: Term) -> Term:
        """This and others behind each other."""
        if not others:
            return self
        tensors = [self.tensor, *(each.typed(self.tensor.data_type).tensor for each in others)]
        return Term(self._rule, self._rule.graph.concatenate(tensors, axis, name=self._rule.node.name))
