"""The vocabulary of the operation tables: an entry says everything about one operation, once.

From an entry come the builder's signature and documentation, the capture of a call, the rules, the inference of dims
and strides, and the order of ports in the canonical form. Named tuples, because they are quick to import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn_jax.graph.layout import Dims
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.tensor import Tensor
    from cudnn_jax.graph.transposed import Transposed

Symbols = dict[str, int]
Layout = tuple[Dims, Dims]
"""(dim, stride)"""

Derivative = Callable[["Transposed"], Mapping[str, Any]]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Kind(NamedTuple):
    """What an attribute's value may be. `parse` returns the plain value, or raises ValueError or TypeError."""

    annotation: str
    rule: str
    parse: Callable[[Any], Any]


class Input(NamedTuple):
    """A port that takes a tensor.

    Attributes:
      shape: dims as symbols, "B N T D"; with a leading "~" the tensor broadcasts to them. None: the operation's own.
      types: data types allowed, or input ports that have one; any if empty.
      number: a plain number may come instead, and is then the attribute of this name.
      replaced: (another port, shape): the shape when that port is wired.
      keyword: False for ports that only an expanded keyword fills.
      many: the keyword takes a sequence of tensors; the node's ports are then "name[0]", "name[1]" and so on.
    """

    name: str
    doc: str = ""
    shape: str | None = None
    optional: bool = False
    types: tuple[data_type | str, ...] = ()
    number: bool = False
    replaced: tuple[str, str] | None = None
    keyword: bool = True
    many: bool = False

    @property
    def names(self) -> Iterator[str]:
        """The names that the node's ports may have, in order."""
        return (f"{self.name}[{at}]" for at in count()) if self.many else iter((self.name,))


class Output(NamedTuple):
    """A port that gives a tensor.

    Attributes:
      layout: infers (dim, stride), of no axes while the caller has to set them; None for an output that the caller
        makes and passes by keyword.
      when: whether the output exists, from parameters and input ports; it does if None.
      type: the data type that the operation fixes.
      like: the input port whose data type it has where that is wired; `type` holds elsewhere.
      shape: the dims of an output that the caller makes, as symbols.
      over: (flag, input port): where that attribute is set, the output is that input's buffer, written over.
    """

    name: str
    doc: str = ""
    layout: Callable[[Node, Symbols], Layout] | None = None
    when: Callable[[Mapping[str, Any], Mapping[str, Tensor]], bool] | None = None
    type: data_type = data_type.NOT_SET
    shape: str | None = None
    like: str = ""
    over: tuple[str, str] | None = None

    @property
    def from_caller(self) -> bool:
        return self.layout is None


class Attribute(NamedTuple):
    """A plain value. `binds` names the shape symbol that the value is, where no tensor tells it."""

    name: str
    kind: Kind
    doc: str = ""
    default: Any = None
    required: bool = False
    binds: str | None = None


class Operation(NamedTuple):
    """One operation.

    Attributes:
      name: the builder's name.
      type: the node's type.
      summary: the first line of the documentation.
      inputs, outputs: ports in canonical order.
      attributes: plain parameters.
      keywords: the builder's parameters in positional order, where that is not ports, then attributes.
      keyword_only: parameters that have no position.
      fixed: parameters that the entry itself settles, such as a pointwise mode.
      expand: keywords that stand for several ports and attributes -> the function that takes them apart.
      settle: brings different spellings of one meaning into one.
      rules: what must hold beyond the ports' shapes.
      python_only: whether engines of Python alone run it: the cuDNN backend has no such node.
      derivative: a node whose outputs have cotangents -> gradients by input port; of ports that it leaves out there are
        none, and None is a gradient of 0. No rule if None: the operation is then not differentiated.
      differentiated: parameters that a node has in a forward whose gradients are wanted.
      rebuilt: whether a backward makes a node's outputs again rather than have the forward keep them.
    """

    name: str
    type: str
    summary: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    attributes: tuple[Attribute, ...] = ()
    keywords: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = _NOTHING
    expand: Mapping[str, Callable[[Any], Mapping[str, Any]]] = _NOTHING
    settle: Callable[[dict[str, Any]], None] | None = None
    rules: tuple[Callable[[Node, Symbols], None], ...] = ()
    python_only: bool = False
    derivative: Derivative | None = None
    differentiated: Mapping[str, Any] = _NOTHING
    rebuilt: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """The builder's parameters that have a position."""
        if self.keywords:
            return self.keywords
        ports = [port.name for port in self.inputs]
        return (*ports, *(attribute.name for attribute in self.attributes), "compute_data_type", "name")

    @property
    def defaults(self) -> dict[str, Any]:
        """Every parameter at the value that means "not given"."""
        numbers = {port.name: None for port in self.inputs if port.number}
        return numbers | {attribute.name: attribute.default for attribute in self.attributes}
