"""Reverse mode: the graph that turns the cotangents of a graph's outputs into gradients of its inputs.

The nodes are walked from the last to the first, and each operation's `derivative` says how a node hands the cotangents
of its outputs on to its inputs. What it reads of the forward is a value of the backward, one of four kinds:

- an input of the forward is an input of the backward, and a number stays one;
- so is an output of the forward;
- what an operation makes that is `rebuilt`, such as the pointwise ones, is made again by a copy of its node: to keep it
  would save no more than the reading of its operands;
- anything else is kept: it is a further output of a copy of the forward, `Differentiable.forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cudnn_jax.graph.copies import made_by_caller, node_again, tensor_again
from cudnn_jax.graph.transposed import FLOATS, Term, Transposed
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.pygraph import pygraph
    from cudnn_jax.graph.tensor import Tensor


class Origin(NamedTuple):
    """What an input of a backward is: an "input" of the forward, the "cotangent" of an output, or "kept".

    `position` is among the inputs or outputs of the graph that is differentiated, or in `Differentiable.kept`. Where
    `order` is not empty, the axes are in that order.
    """

    side: str
    position: int
    order: tuple[int, ...] = ()


class Backward(NamedTuple):
    """An open graph of gradients: what each of its inputs is, and where the gradient of each input of the forward is.

    `gradients` maps positions of the forward's inputs to those of the graph's outputs. A gradient that is left out is
    0; where all are, the graph has no nodes.
    """

    graph: pygraph
    origins: tuple[Origin, ...]
    gradients: Mapping[int, int]


class Differentiable:
    """A frozen graph, made ready for gradients of some of its inputs.

    Args:
      graph: a frozen graph.
      wanted: the positions of inputs whose gradients are wanted.

    Attributes:
      forward: a frozen graph of the same inputs, whose outputs hold what the backward needs beside the graph's own: the
        graph itself, where it has that already.
      outputs: where the graph's outputs are among the forward's.
      kept: where among the forward's outputs those are that the backward may take.

    Raises:
      NotImplementedError: between these inputs and each output there is a node without a derivative; the message names
        it. `backward` raises it for the outputs that it holds for.
    """

    def __init__(self, graph: pygraph, wanted: Iterable[int]) -> None:
        self._wanted = frozenset(wanted)
        _check_ragged(graph)
        self._copy, self._outputs = _ready(graph, self._wanted)
        self._inputs = self._copy.inputs
        self._taken: dict[int, Tensor] = {}
        # What the cotangents of several outputs need, those of one of them need too.
        refusals = [self._learn(at) for at, tensor in enumerate(self._outputs) if differentiable(tensor)]
        if refusals and all(refusals):
            raise refusals[0]  # type: ignore[misc]
        inside = [tensor for tensor in self._taken.values() if tensor.is_virtual]
        for tensor in inside:
            tensor.set_output(True)
        self._copy.freeze()
        position = {id(tensor): at for at, tensor in enumerate(self._copy.outputs)}
        self.outputs = tuple(position[id(tensor)] for tensor in self._outputs)
        self.kept = tuple(position[each] for each in self._taken)
        self.forward = self._copy if inside else graph

    def _learn(self, position: int) -> NotImplementedError | None:
        """Takes what the cotangent of one output needs; returns why that has no gradients, if so."""
        before = dict(self._taken)
        try:
            self.backward([position])
        except NotImplementedError as error:
            self._taken = before
            return error
        return None

    def backward(self, given: Iterable[int]) -> Backward:
        """The graph of the gradients from the cotangents of the outputs at these positions."""
        walk = _Walk(self._copy, self._inputs, self._wanted, self._take)
        for at in given:
            walk.start(at, self._outputs[at])
        return walk.run()

    def _take(self, tensor: Tensor) -> int:
        """The position in `kept` of a tensor that a node of the forward makes."""
        if not self._copy.frozen:
            self._taken.setdefault(id(tensor), tensor)
        return list(self._taken).index(id(tensor))


def differentiable(tensor: Tensor) -> bool:
    """Whether a tensor has a gradient: where it is floating, but for scales that are powers of two."""
    return tensor.data_type.is_floating and tensor.data_type is not data_type.FP8_E8M0


def _check_ragged(graph: pygraph) -> None:
    """A ragged output has no rows past a sequence's end, and inside of the graph it may have: nobody keeps those."""
    read = {id(tensor) for node in graph.nodes for tensor in node.inputs.values()}
    for tensor in graph.outputs:
        if tensor.ragged_offset is not None and id(tensor) in read:
            raise NotImplementedError(f"the ragged output {tensor.label}, which a node reads, has no derivative")


def _depends(node: Node, moving: Collection[int]) -> bool:
    return any(id(tensor) in moving for tensor in node.inputs.values())


def _ready(graph: pygraph, wanted: Collection[int]) -> tuple[pygraph, list[Tensor]]:
    """A copy and its outputs, in the graph's order; nodes behind what is wanted have `differentiated` parameters."""
    made = type(graph)(graph.name, graph.io_data_type, graph.intermediate_data_type, graph.compute_data_type)
    copies: dict[int, Tensor] = {}
    moving = {id(tensor) for at, tensor in enumerate(graph.inputs) if at in wanted}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = again = tensor_again(made, tensor)
            if tensor.ragged_offset is not None:
                again.ragged_offset = copy(tensor.ragged_offset)
        return copies[id(tensor)]

    for node in graph.nodes:
        own = made_by_caller(node)
        depends = _depends(node, moving)
        again = node_again(
            made,
            node,
            {port: copy(tensor) for port, tensor in node.inputs.items()},
            {port: copy(tensor) for port, tensor in own.items()},
            **(node.operation.differentiated if depends else {}),
        )
        for port, tensor in node.outputs.items():
            copies[id(tensor)] = again.outputs[port]
            if not tensor.is_inside:
                again.outputs[port].set_output(True).set_stride(tensor.stride)
                if tensor.ragged_offset is not None:
                    again.outputs[port].ragged_offset = copy(tensor.ragged_offset)
            if depends and differentiable(tensor):
                moving.add(id(tensor))
    return made, [copies[id(tensor)] for tensor in graph.outputs]


class _Walk:
    """One pass over a forward's nodes, from the last to the first.

    Args:
      forward: the graph, with its inputs.
      wanted: the positions of the inputs whose gradients are wanted.
      take: the position among what is kept of a tensor that a node makes.
    """

    def __init__(
        self, forward: pygraph, inputs: Sequence[Tensor], wanted: Collection[int], take: Callable[[Tensor], int]
    ) -> None:
        types = (forward.intermediate_data_type, forward.compute_data_type)
        floating = (kind if kind in FLOATS else data_type.FLOAT for kind in types)
        self.graph = type(forward)(forward.name, forward.io_data_type, *floating)
        self._forward = forward
        self._take = take
        self._inputs = inputs
        self._wanted = sorted(wanted)
        self._moving = {id(inputs[at]) for at in wanted}
        for node in forward.nodes:
            if _depends(node, self._moving):
                self._moving |= {id(tensor) for tensor in node.outputs.values() if differentiable(tensor)}
        self._values: dict[int, Tensor] = {}
        self._cotangents: dict[int, Tensor] = {}
        self._origins: dict[int, Origin] = {}
        self._views: dict[tuple[Origin, tuple[int, ...]], Tensor] = {}

    def start(self, position: int, tensor: Tensor) -> None:
        """Takes the cotangent of an output, the one at `position` of those that the caller knows."""
        if id(tensor) in self._moving:
            made = self.graph.tensor(tensor.dim, tensor.stride, tensor.data_type, tensor.name and f"d_{tensor.name}")
            self._lay_out(made, tensor)
            self._origins[id(made)] = Origin("cotangent", position)
            self._cotangents[id(tensor)] = made

    def run(self) -> Backward:
        for node in reversed(self._forward.nodes):
            if any(id(tensor) in self._cotangents for tensor in node.outputs.values()):
                self._transpose(node)
        made = {}
        for at in self._wanted:
            tensor = self._inputs[at]
            if id(tensor) in self._cotangents:
                made[at] = self._as_output(tensor)
        position = {id(tensor): at for at, tensor in enumerate(self.graph.outputs)}
        origins = tuple(self._origins[id(tensor)] for tensor in self.graph.inputs)
        return Backward(self.graph, origins, {at: position[id(tensor)] for at, tensor in made.items()})

    def _transpose(self, node: Node) -> None:
        """Adds what a node hands on to the cotangents of its inputs."""
        wanted = tuple(port for port, tensor in node.inputs.items() if id(tensor) in self._moving)
        cotangents = {
            port: self._cotangents[id(tensor)]
            for port, tensor in node.outputs.items()
            if id(tensor) in self._cotangents
        }
        if not wanted:
            return
        rule = Transposed(self.graph, node, wanted, cotangents, self)
        if node.operation.derivative is None:
            rule.refuse()
        gradients = node.operation.derivative(rule)
        for port in wanted:
            if port not in gradients:
                rule.refuse(f"none by {port}")
            if gradients[port] is not None:
                if rule.compute not in FLOATS:
                    rule.refuse(f"it computes in {rule.compute.value}")
                self._add(node.inputs[port], gradients[port], rule)

    def _add(self, tensor: Tensor, gradient: Term, rule: Transposed) -> None:
        if id(tensor) in self._cotangents:
            gradient = Term(rule, self._cotangents[id(tensor)]) + gradient
        self._cotangents[id(tensor)] = gradient.tensor

    def value(self, tensor: Tensor) -> Tensor:
        """A tensor of the forward, in the backward."""
        if id(tensor) not in self._values:
            self._values[id(tensor)] = self._valued(tensor)
        return self._values[id(tensor)]

    def view(self, tensor: Tensor, order: tuple[int, ...]) -> Tensor | None:
        """What the caller gives for a tensor of the backward, its axes in another order; None of what a node makes."""
        if id(tensor) not in self._origins or tensor.ragged_offset is not None:
            return None
        origin = self._origins[id(tensor)]
        whole = tuple(origin.order[axis] for axis in order) if origin.order else order
        if (origin, whole) not in self._views:
            dim, stride = (tuple(each[axis] for axis in order) for each in (tensor.dim, tensor.stride))
            made = self.graph.tensor(dim, stride, tensor.data_type, tensor.name)
            self._origins[id(made)] = origin._replace(order=whole)
            self._views[origin, whole] = made
        return self._views[origin, whole]

    def _valued(self, tensor: Tensor) -> Tensor:
        node = tensor.producer
        if node is not None and tensor.is_virtual and node.operation.rebuilt:
            made = node_again(self.graph, node, {port: self.value(each) for port, each in node.inputs.items()}, {})
            return made.outputs[next(port for port, each in node.outputs.items() if each is tensor)]
        again = tensor_again(self.graph, tensor)
        self._lay_out(again, tensor)
        if node is not None:
            self._origins[id(again)] = Origin("kept", self._take(tensor))
        elif not tensor.is_pass_by_value:
            self._origins[id(again)] = Origin("input", next(at for at, x in enumerate(self._inputs) if x is tensor))
        return again

    def _as_output(self, tensor: Tensor) -> Tensor:
        """The gradient of an input, in its dims, strides and type."""
        made = self._cotangents[id(tensor)]
        if made.dim != tensor.dim:
            like = self.value(tensor)
            made = self.graph.binary_select(made, made, self.graph.cmp_eq(like, like).set_data_type("bool"))
        read = any(made is each for node in self.graph.nodes for each in node.inputs.values())
        fixed = made._fixed_type not in (data_type.NOT_SET, tensor.data_type)
        if made.producer is None or not made.is_virtual or read or fixed:
            made = self.graph.identity(made)
        made.set_output(True).set_data_type(tensor.data_type).set_dim(tensor.dim).set_stride(tensor.stride)
        return self._lay_out(made, tensor)

    def _lay_out(self, made: Tensor, tensor: Tensor) -> Tensor:
        """A tensor of the backward whose sequences lie as those of one of the forward."""
        if tensor.ragged_offset is not None:
            made.ragged_offset = self.value(tensor.ragged_offset)
        return made
