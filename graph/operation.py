"""The vocabulary of the operation tables: an entry says everything about one operation, once.

From an entry come the builder's signature and documentation, the capture of a call, the rules, the inference of dims
and strides, and the order of ports in the canonical form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cudnn_jax.graph.layout import Dims
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.tensor import Tensor

Symbols = dict[str, int]
Layout = tuple[Dims, Dims]
"""(dim, stride)"""


@dataclass(frozen=True)
class Kind:
    """What an attribute's value may be. `parse` returns the plain value, or raises ValueError or TypeError."""

    annotation: str
    rule: str
    parse: Callable[[Any], Any]


@dataclass(frozen=True)
class Input:
    """A port that takes a tensor.

    Attributes:
      shape: dims as symbols, "B N T D"; with a leading "~" the tensor broadcasts to them. None: the operation's own.
      types: data types allowed; any if empty.
      number: a plain number may come instead, and is then the attribute of this name.
      replaced: (another port, shape): the shape when that port is wired.
      keyword: False for ports that only an expanded keyword fills.
    """

    name: str
    doc: str = ""
    shape: str | None = None
    optional: bool = False
    types: tuple[data_type, ...] = ()
    number: bool = False
    replaced: tuple[str, str] | None = None
    keyword: bool = True


@dataclass(frozen=True)
class Output:
    """A port that gives a tensor.

    Attributes:
      layout: infers (dim, stride).
      when: whether the output exists, from parameters and input ports; it does if None.
      type: the data type that the operation fixes.
      shape: for an output that the caller makes and passes by keyword: its dims as symbols.
    """

    name: str
    doc: str = ""
    layout: Callable[[Node, Symbols], Layout] | None = None
    when: Callable[[Mapping[str, Any], Mapping[str, Tensor]], bool] | None = None
    type: data_type = data_type.NOT_SET
    shape: str | None = None

    @property
    def from_caller(self) -> bool:
        return self.layout is None


@dataclass(frozen=True)
class Attribute:
    """A plain value. `binds` names the shape symbol that the value is, where no tensor tells it."""

    name: str
    kind: Kind
    doc: str = ""
    default: Any = None
    required: bool = False
    binds: str | None = None


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
      name: the builder's name.
      type: the node's type.
      summary: the first line of the documentation.
      inputs, outputs: ports in canonical order.
      attributes: plain parameters.
      arguments: the builder's parameters in positional order; ports, then attributes, if empty.
      keyword_only: parameters that follow `arguments` and have no position.
      fixed: parameters that the entry itself settles, such as a pointwise mode.
      expand: keywords that stand for several ports and attributes -> the function that takes them apart.
      settle: brings different spellings of one meaning into one.
      rules: what must hold beyond the ports' shapes.
    """

    name: str
    type: str
    summary: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    attributes: tuple[Attribute, ...] = ()
    arguments: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    expand: Mapping[str, Callable[[Any], Mapping[str, Any]]] = field(default_factory=dict)
    settle: Callable[[dict[str, Any]], None] | None = None
    rules: tuple[Callable[[Node, Symbols], None], ...] = ()

    def __post_init__(self) -> None:
        if not self.arguments:
            ports = [port.name for port in self.inputs if port.keyword]
            names = (*ports, *(attribute.name for attribute in self.attributes), "compute_data_type", "name")
            object.__setattr__(self, "arguments", names)
        for table in ("fixed", "expand"):
            object.__setattr__(self, table, MappingProxyType(dict(getattr(self, table))))

    @property
    def defaults(self) -> dict[str, Any]:
        """Every parameter at the value that means "not given"."""
        numbers = {port.name: None for port in self.inputs if port.number}
        return numbers | {attribute.name: attribute.default for attribute in self.attributes}
