"""Builder methods made from the tables, with signatures and documentation of their own."""

from __future__ import annotations

from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any

from cudnn_jax.graph.captured import CAPTURED
from cudnn_jax.graph.operation import Operation
from cudnn_jax.graph.pointwise import POINTWISE
from cudnn_jax.graph.structured import STRUCTURED

if TYPE_CHECKING:
    import inspect

    from cudnn_jax.graph.pygraph import pygraph

OPERATIONS = MappingProxyType({**POINTWISE, **STRUCTURED, **CAPTURED})
WRITTEN_OUT = ("matmul",)
GENERATED = {name: operation for name, operation in OPERATIONS.items() if name not in WRITTEN_OUT}


class Builder:
    """The method that adds nodes of one operation to a graph."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.__name__ = operation.name
        self.__qualname__ = f"pygraph.{operation.name}"
        self.__doc__ = documentation(operation)

    def __get__(self, graph: pygraph | None, owner: type | None = None) -> Any:
        return self if graph is None else MethodType(self, graph)

    def __call__(self, graph: pygraph, /, *args: Any, **kwargs: Any) -> Any:
        return graph._add(self.operation, args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return signature(self.operation)


def documentation(operation: Operation) -> str:
    """The builder's docstring."""
    docs = {"compute_data_type": "Type to compute in; the graph's if absent.", "name": "The node's name."}
    docs |= {port.name: port.doc for port in operation.inputs}
    docs |= {attribute.name: attribute.doc for attribute in operation.attributes}
    docs |= {output.name: f"Output that the caller makes. {output.doc}" for output in operation.outputs}
    lines = [operation.summary, "", "Args:"]
    lines += [f"  {name}: {docs[name]}" for name in (*operation.arguments, *operation.keyword_only)]
    lines += ["", "Returns:"]
    for output in operation.outputs:
        if not output.from_caller:
            lines.append(f"  {output.name}: {output.doc}{' None unless asked for.' if output.when else ''}")
    return "\n".join(lines)


def signature(operation: Operation) -> inspect.Signature:
    """The builder's signature, annotations as text."""
    # Nobody who only builds graphs needs this module, and it is slow to import.
    from inspect import Parameter, Signature

    def parameter(name: str, kind: Any) -> Parameter:
        annotation, *default = _annotated(operation, name)
        if not default and name in behind_optional:
            annotation, default = f"{annotation} | None", [None]
        return Parameter(name, kind, annotation=annotation, default=default[0] if default else Parameter.empty)

    # Python wants a default behind a default; the capture of a call still asks for what must be given.
    optional = [len(_annotated(operation, name)) == 2 for name in operation.arguments]
    behind_optional = operation.arguments[optional.index(True) :] if True in optional else ()
    first = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    placed = [parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in operation.arguments]
    named = [parameter(name, Parameter.KEYWORD_ONLY) for name in operation.keyword_only]
    return Signature([first, *placed, *named], return_annotation=_returns(operation))


def _annotated(operation: Operation, name: str) -> tuple[str] | tuple[str, Any]:
    """(annotation, default), or (annotation,) for what must be given."""
    if name in operation.expand:
        return "Sequence[Any] | None", None
    for port in operation.inputs:
        if port.name == name:
            kind = "Tensor | float" if port.number else "Sequence[Tensor]" if port.many else "Tensor"
            return (f"{kind} | None", None) if port.optional else (kind,)
    for attribute in operation.attributes:
        if attribute.name == name:
            kind = attribute.kind.annotation
            if attribute.required:
                return (kind,)
            return (f"{kind} | None" if attribute.default is None else kind), attribute.default
    return {"name": ("str", ""), "compute_data_type": ("Any", None)}.get(name, ("Tensor | None", None))


def _returns(operation: Operation) -> str:
    made = [output for output in operation.outputs if not output.from_caller]
    kinds = ["Tensor" if output.when is None else "Tensor | None" for output in made]
    return kinds[0] if len(kinds) == 1 else f"tuple[{', '.join(kinds)}]"
