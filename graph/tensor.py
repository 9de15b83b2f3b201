"""A tensor of a graph: what the caller said about it, and what the graph inferred."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from cudnn_jax.graph import types
from cudnn_jax.graph.errors import GraphFrozenError, GraphValidationError, shown
from cudnn_jax.graph.layout import Dims, as_dims, row_major
from cudnn_jax.graph.names import as_name
from cudnn_jax.graph.show import tensor_line

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.pygraph import pygraph


class Tensor:
    """An edge of the graph. Made by `pygraph.tensor`, `pygraph.scalar` and the operations, never directly.

    Attributes may be written, or set by the fluent setters, until the graph is frozen.
    """

    __slots__ = (
        "__weakref__",
        "_data_type",
        "_dim",
        "_fixed_type",
        "_graph",
        "_inferred_dim",
        "_inferred_stride",
        "_is_pass_by_value",
        "_is_virtual",
        "_name",
        "_producer",
        "_ragged_offset",
        "_stride",
        "_uid",
        "_value",
    )

    def __init__(self, graph: pygraph, name: str, *, is_virtual: bool = False) -> None:
        self._graph = graph
        self._name = name
        self._uid = 0
        self._dim: Dims | None = None
        self._stride: Dims | None = None
        self._inferred_dim: Dims = ()
        self._inferred_stride: Dims = ()
        self._data_type = types.data_type.NOT_SET
        self._fixed_type = types.data_type.NOT_SET
        self._is_virtual = is_virtual
        self._is_pass_by_value = False
        self._value: bool | int | float | None = None
        self._ragged_offset: Tensor | None = None
        self._producer: Node | None = None

    def _open(self, attribute: str) -> None:
        if self._graph.frozen:
            raise GraphFrozenError(f"tensor {self.label}: {attribute} cannot change; the graph is frozen")
        self._graph._changed()

    @property
    def label(self) -> str:
        """The name for people: the tensor's own, or its uid's."""
        return repr(self._name) if self._name else f"#{self._uid}"

    @property
    def uid(self) -> int:
        """Unique in the graph. Automatic until set; an automatic one moves away when a user asks for its number."""
        return self._uid

    @uid.setter
    def uid(self, uid: int) -> None:
        self._open("uid")
        self._graph._uids.claim(self, uid)

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._open("name")
        self._name = as_name(f"tensor {self.label}", name)

    @property
    def dim(self) -> Dims:
        """Dimensions, as the user set them or as the operation makes them."""
        return self._inferred_dim if self._dim is None else self._dim

    @dim.setter
    def dim(self, dim: Any) -> None:
        self._open("dim")
        self._dim = _checked(self, "dim", dim)
        self._graph._infer(self)

    @property
    def stride(self) -> Dims:
        """Elements between neighbours along each axis."""
        if self._stride is not None:
            return self._stride
        if self.dim == self._inferred_dim:
            return self._inferred_stride
        return row_major(self.dim)

    @stride.setter
    def stride(self, stride: Any) -> None:
        self._open("stride")
        self._stride = _checked(self, "stride", stride)
        self._graph._infer(self)

    @property
    def layout_is_user(self) -> bool:
        """Whether the caller set dim or stride, rather than the operation that makes the tensor."""
        return self._dim is not None or self._stride is not None

    @property
    def data_type(self) -> types.data_type:
        """The element type: as set, as the operation fixes it, or the graph's default for its kind of tensor."""
        for given in (self._data_type, self._fixed_type):
            if given is not types.data_type.NOT_SET:
                return given
        return self._graph.intermediate_data_type if self.is_inside else self._graph.io_data_type

    @data_type.setter
    def data_type(self, value: Any) -> None:
        self._open("data_type")
        self._data_type = types.data_type.of(value)
        self._graph._infer(self)

    @property
    def is_virtual(self) -> bool:
        """Whether the tensor is said to live inside the graph only: the caller neither gives nor gets it."""
        return self._is_virtual

    @is_virtual.setter
    def is_virtual(self, value: bool) -> None:
        self._open("is_virtual")
        self._is_virtual = bool(value)

    @property
    def is_inside(self) -> bool:
        """Whether the tensor does live inside the graph only.

        `is_virtual` is a word of the cuDNN backend's, and results are virtual until somebody asks for them. Where a
        node runs in engines of Python alone and nobody asked, every result that no node reads is the caller's.
        """
        return self._is_virtual and not (self._producer is not None and self._graph._gives(self))

    @property
    def is_pass_by_value(self) -> bool:
        """Whether the tensor is the one number `value`, part of the graph itself."""
        return self._is_pass_by_value

    @is_pass_by_value.setter
    def is_pass_by_value(self, value: bool) -> None:
        self._open("is_pass_by_value")
        self._is_pass_by_value = bool(value)

    @property
    def value(self) -> bool | int | float | None:
        return self._value

    @value.setter
    def value(self, value: bool | int | float | None) -> None:
        self._open("value")
        self._value = None if value is None else _plain_number(self, value)

    @property
    def ragged_offset(self) -> Tensor | None:
        """Where each sequence of the batch starts, in elements: (B + 1, 1, 1, 1), int32 or int64."""
        return self._ragged_offset

    @ragged_offset.setter
    def ragged_offset(self, offset: Tensor | None) -> None:
        self._open("ragged_offset")
        if offset is not None and (not isinstance(offset, Tensor) or offset._graph is not self._graph):
            raise GraphValidationError(
                f"tensor {self.label}: ragged_offset is {offset!r}; the rule: a tensor of the same graph"
            )
        self._ragged_offset = offset

    @property
    def producer(self) -> Node | None:
        """The node that makes the tensor; None for what the caller gives."""
        return self._producer

    def set_uid(self, uid: int) -> Tensor:
        self.uid = uid
        return self

    def set_name(self, name: str) -> Tensor:
        self.name = name
        return self

    def set_dim(self, dim: Any) -> Tensor:
        self.dim = dim
        return self

    def set_stride(self, stride: Any) -> Tensor:
        self.stride = stride
        return self

    def set_data_type(self, value: Any) -> Tensor:
        self.data_type = value
        return self

    def set_output(self, value: bool) -> Tensor:
        """True: the caller gets the tensor. False: it stays inside the graph."""
        self.is_virtual = not value
        return self

    def set_is_virtual(self, value: bool) -> Tensor:
        self.is_virtual = value
        return self

    def set_is_pass_by_value(self, value: bool) -> Tensor:
        self.is_pass_by_value = value
        return self

    def set_ragged_offset(self, offset: Tensor | None) -> Tensor:
        self.ragged_offset = offset
        return self

    def get_uid(self) -> int:
        return self.uid

    def get_name(self) -> str:
        return self.name

    def get_dim(self) -> list[int]:
        return list(self.dim)

    def get_stride(self) -> list[int]:
        return list(self.stride)

    def get_data_type(self) -> types.data_type:
        return self.data_type

    def get_is_virtual(self) -> bool:
        return self.is_virtual

    def get_is_pass_by_value(self) -> bool:
        return self.is_pass_by_value

    def get_ragged_offset(self) -> Tensor | None:
        return self.ragged_offset

    def __reduce__(self) -> tuple[Any, ...]:
        return _tensor_of, (self._graph, self._uid)

    def __repr__(self) -> str:
        return tensor_line(self)


def _tensor_of(graph: pygraph, uid: int) -> Tensor:
    return graph.tensor_of_uid(uid)


def _checked(tensor: Tensor, attribute: str, values: Any) -> Dims:
    try:
        return as_dims(attribute, values)
    except ValueError as error:
        raise GraphValidationError(f"tensor {tensor.label}: {error}") from None


def _plain_number(tensor: Tensor, value: Any) -> bool | int | float:
    """A Python number from a number of any library."""
    if isinstance(value, bool | int | float):
        return value
    try:
        return index(value) if hasattr(value, "__index__") else float(value)
    except (TypeError, ValueError, OverflowError):
        raise GraphValidationError(f"tensor {tensor.label}: value is {shown(value)}; the rule: one number") from None
