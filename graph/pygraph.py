"""`pygraph`: a graph of operations over tensors, built, checked, frozen and read in Python."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Self

from cudnn_jax.graph import canonical, types
from cudnn_jax.graph._methods import Methods
from cudnn_jax.graph.call import Call, capture
from cudnn_jax.graph.errors import GraphFrozenError, GraphValidationError
from cudnn_jax.graph.layout import as_dims
from cudnn_jax.graph.names import as_name
from cudnn_jax.graph.node import Node
from cudnn_jax.graph.operation import Operation
from cudnn_jax.graph.show import graph_text
from cudnn_jax.graph.structured import MATMUL
from cudnn_jax.graph.tensor import Tensor
from cudnn_jax.graph.types import data_type
from cudnn_jax.graph.uids import Uids
from cudnn_jax.graph.validate import infer_node, validate

_TYPES = ("io_data_type", "intermediate_data_type", "compute_data_type")


class pygraph(Methods):
    """A graph in cuDNN's terms.

    Tensors come from `tensor`, `tensor_like` and `scalar`; every operation of the tables is a method that adds a node
    and returns its outputs. An output stays inside the graph until `set_output(True)`.

    A graph that is copied or unpickled is what `from_json` makes of `to_json`: another graph with the same names and
    uids, open, without plans. Its tensors and nodes are copied and pickled with it.

    Args:
      name: for people; not part of the canonical form.
      io_data_type: data type of tensors that the caller gives or gets, where they do not say their own.
      intermediate_data_type: the same for tensors inside the graph.
      compute_data_type: the type that operations compute in.
    """

    name: str
    io_data_type: data_type
    intermediate_data_type: data_type
    compute_data_type: data_type

    def __init__(
        self,
        name: str = "",
        io_data_type: Any = None,
        intermediate_data_type: Any = data_type.FLOAT,
        compute_data_type: Any = data_type.FLOAT,
    ) -> None:
        self._nodes: list[Node] = []
        self._tensors: list[Tensor] = []
        self._uids = Uids()
        self._read: set[int] = set()
        self._json = ""
        self.name = name
        self.io_data_type = io_data_type
        self.intermediate_data_type = intermediate_data_type
        self.compute_data_type = compute_data_type

    def __setattr__(self, attribute: str, value: Any) -> None:
        self._open(f"{attribute} cannot change")
        if attribute in _TYPES:
            try:
                value = data_type.of(value)
            except GraphValidationError as error:
                raise GraphValidationError(f"graph {self.name!r}: {attribute}: {error}") from None
        elif attribute == "name":
            value = as_name("graph", value)
        object.__setattr__(self, attribute, value)

    def __delattr__(self, attribute: str) -> None:
        self._open(f"{attribute} cannot go")
        object.__delattr__(self, attribute)

    def _open(self, what: str) -> None:
        if self.frozen:
            raise GraphFrozenError(f"graph {self.__dict__.get('name', '')!r}: {what}; the graph is frozen")
        self._changed()

    def _changed(self) -> None:
        """What was found of the graph before is forgotten: it is about to change."""
        self.__dict__["_validated"] = False

    # Tensors

    def tensor(
        self,
        dim: Any,
        stride: Any = None,
        data_type: Any = None,
        name: str = "",
        uid: int | None = None,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        value: bool | int | float | None = None,
        ragged_offset: Tensor | None = None,
    ) -> Tensor:
        """A tensor that the caller gives, or an output that the caller makes.

        Args:
          dim: dimensions; 0 is legal.
          stride: elements between neighbours along each axis; row-major if absent.
          data_type: the graph's io_data_type if absent.
          name: for people.
          uid: the caller's own number for the tensor.
          is_virtual: whether the tensor lives inside the graph only.
          is_pass_by_value: whether the tensor is the number `value`; a value says so by itself.
          value: the number.
          ragged_offset: where each sequence of the batch starts, in elements.
        """
        self._open("no tensor can be added")
        name = as_name("tensor", name)
        label = f"tensor {name!r}" if name else "tensor"
        try:
            dims = as_dims("dim", dim)
            strides = None if stride is None else as_dims("stride", stride)
            if strides is not None and len(strides) != len(dims):
                raise ValueError(f"stride is {strides} and dim is {dims}; the rule: one stride for each dim")
            kind = types.data_type.of(data_type)
        except ValueError as error:
            raise GraphValidationError(f"{label}: {error}") from None
        tensor = Tensor(self, name, is_virtual=bool(is_virtual))
        tensor._dim, tensor._stride, tensor._data_type = dims, strides, kind
        if value is not None or is_pass_by_value:
            tensor.is_pass_by_value = True
            tensor.value = value
        tensor.ragged_offset = ragged_offset
        self._register(tensor, uid)
        return tensor

    def tensor_like(self, tensor: Tensor, name: str = "") -> Tensor:
        """A tensor with the dims, strides and data type of another one."""
        if not isinstance(tensor, Tensor):
            raise GraphValidationError(f"tensor_like: {tensor!r} came; the rule: a Tensor")
        return self.tensor(tensor.dim, tensor.stride, tensor.data_type, name)

    def scalar(self, value: bool | int | float, data_type: Any = None, name: str = "", rank: int = 4) -> Tensor:
        """A number as a tensor of one element; it is part of the graph, not an operand."""
        return self.tensor((1,) * rank, None, data_type, name, is_pass_by_value=True, value=value)

    def _register(self, tensor: Tensor, uid: int | None = None) -> None:
        if uid is None:
            self._uids.assign(tensor)
        else:
            self._uids.claim(tensor, uid)
        self._tensors.append(tensor)

    # Operations

    def matmul(
        self, A: Tensor, B: Tensor, name: str = "", compute_data_type: Any = None, padding: float = 0.0
    ) -> Tensor:
        """The matrix product of the last two axes; leading axes broadcast.

        Args:
          A: (..., M, K).
          B: (..., K, N).
          name: the node's name.
          compute_data_type: type to compute in; the graph's if absent.
          padding: what elements beyond an override length count as.

        Returns:
          C: (..., M, N).
        """
        keywords = {"A": A, "B": B, "padding": padding, "compute_data_type": compute_data_type, "name": name}
        made: Tensor = self._add(MATMUL, (), keywords)
        return made

    def _add(self, operation: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Adds a node; returns its output, or the tuple of its outputs with None for those that do not exist."""
        self._open(f"{operation.name} cannot be added")
        node = self._place(operation, capture(operation, args, kwargs))
        made = tuple(node._outputs.get(output.name) for output in operation.outputs if not output.from_caller)
        return made[0] if len(made) == 1 else made

    def _place(self, operation: Operation, call: Call) -> Node:
        self._check_wiring(call)
        outputs: dict[str, Tensor] = {}
        made: list[Tensor] = []
        for output in operation.outputs:
            tensor = call.given.get(output.name)
            if not output.from_caller:
                if output.when is not None and not output.when(call.params, call.inputs):
                    continue
                name = f"{call.name}::{output.name}" if call.name else ""
                tensor = Tensor(self, name, is_virtual=True)
                made.append(tensor)
            if tensor is not None:
                outputs[output.name] = tensor
        node = Node(self, operation, call.name, call.inputs, outputs, call.params, call.compute_data_type)
        infer_node(node)
        for tensor in outputs.values():
            tensor._producer = node
        for tensor in made:
            self._register(tensor)
        self._nodes.append(node)
        self._read |= {id(tensor) for tensor in call.inputs.values()}
        return node

    def _gives(self, tensor: Tensor) -> bool:
        """Whether the result of a node is the caller's even if it is virtual."""
        if not self.python_only or id(tensor) in self._read:
            return False
        return all(made._is_virtual for node in self._nodes for made in node._outputs.values())

    def _restore(self, tensors: list[tuple[Tensor, int, bool]]) -> None:
        """Gives tensors the order and the uids that they had in another process; the bool is whether of the user."""
        self._tensors[:] = (tensor for tensor, _, _ in tensors)
        self._uids.restore(tensors)

    def _check_wiring(self, call: Call) -> None:
        """Tensors are this graph's, and an output that the caller made is nobody else's yet."""
        for port, tensor in (*call.inputs.items(), *call.given.items()):
            if tensor._graph is not self:
                raise GraphValidationError(f"{call.label}: {port} is {tensor!r}; the rule: a tensor of this graph")
        if not call.given:
            return
        taken = self._read | {id(tensor) for tensor in call.inputs.values()}
        for port, tensor in call.given.items():
            if tensor._producer is not None or id(tensor) in taken:
                raise GraphValidationError(
                    f"{call.label}: {port} is {tensor!r}; the rule: an output is made by one port, and read only later"
                )
            taken.add(id(tensor))

    def _infer(self, changed: Tensor) -> None:
        """Infers again after a tensor changed: the node that makes it, and those behind.

        A node that breaks a rule meanwhile is left for `validate`.
        """
        behind = list(takewhile(lambda node: node is not changed._producer, reversed(self._nodes)))
        for node in (*([changed._producer] if changed._producer else []), *reversed(behind)):
            try:
                infer_node(node)
            except GraphValidationError:
                continue

    # Reading

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The operations, in the order in which they were added."""
        return tuple(self._nodes)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor, in the order in which they were made."""
        return tuple(self._tensors)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that the caller gives, in canonical order."""
        return [tensor for tensor in canonical.ordered_tensors(self) if canonical.is_input(tensor)]

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors that the caller gets, in canonical order."""
        return [tensor for tensor in canonical.ordered_tensors(self) if canonical.is_output(tensor)]

    @property
    def in_place(self) -> dict[int, int]:
        """Position in `outputs` -> position in `inputs` of the tensor whose buffer it is, written over."""
        inputs, outputs = ({id(tensor): at for at, tensor in enumerate(each)} for each in (self.inputs, self.outputs))
        return {
            outputs[id(node.outputs[made])]: inputs[id(node.inputs[port])]
            for node in self._nodes
            for made, port in node.written_over.items()
        }

    @property
    def python_only(self) -> bool:
        """Whether a node is of an operation that engines of Python alone run: the cuDNN backend has no such node."""
        return any(node.operation.python_only for node in self._nodes)

    def tensor_of_uid(self, uid: int) -> Tensor:
        """The tensor that has this uid now; KeyError if none has."""
        return self._uids[uid]

    def __repr__(self) -> str:
        return graph_text(self)

    def inspect(self) -> dict[str, Any]:
        """Everything about the graph as plain dicts, lists, strings and numbers, by uid; open or frozen."""
        from cudnn_jax.graph import inspection  # this and the next ones: needed by few, and by none at start-up

        return inspection.inspect(self)

    def draw(self) -> str:
        """The graph as a drawing of characters, from top to bottom: `o` a tensor, `*` where an operation takes one."""
        from cudnn_jax.graph import draw

        return draw.rails(self)

    def to_dot(self) -> str:
        """The graph in Graphviz' language."""
        from cudnn_jax.graph import draw

        return draw.dot(self)

    def to_json(self) -> str:
        """The graph as JSON text, with names and uids: the same text in every process and on every Python."""
        from cudnn_jax.graph import serial

        return serial.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The open graph that `to_json` wrote.

        Raises:
          GraphValidationError: the text is not `to_json`'s, or the graph breaks a rule; the message says where.
        """
        from cudnn_jax.graph import serial

        return serial.from_json(cls, text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_json, (self.to_json(),)

    # Life cycle

    def validate(self) -> None:
        """Raises GraphValidationError for the first rule that the graph breaks."""
        self._check()

    def _check(self) -> None:
        if not self.validated:
            validate(self)
            self.__dict__["_validated"] = True

    @property
    def validated(self) -> bool:
        """Whether the graph was found to keep every rule, and did not change since."""
        return bool(self.__dict__.get("_validated"))

    def freeze(self) -> None:
        """Validates, then closes the graph: from here on it can be read, never changed."""
        if not self.frozen:
            self._check()
            self.__dict__["_json"] = canonical.to_json(canonical.canonical(self))
            self.__dict__["_frozen"] = True

    @property
    def frozen(self) -> bool:
        return "_frozen" in self.__dict__

    # Canonical form

    def canonical(self) -> dict[str, Any]:
        """What the graph computes, free of names and uids."""
        self._check()
        return canonical.canonical(self)

    def canonical_json(self) -> str:
        """The canonical form as JSON text, the same bytes in every process."""
        return self._json if self.frozen else canonical.to_json(self.canonical())

    def hash(self) -> str:
        """sha256 of the canonical form, in hex."""
        return canonical.digest(self.canonical_json())
