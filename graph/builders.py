"""Builder methods made from the tables, with signatures and documentation of their own."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from cudnn_jax.graph.captured import CAPTURED
from cudnn_jax.graph.operation import Operation
from cudnn_jax.graph.pointwise import POINTWISE
from cudnn_jax.graph.structured import STRUCTURED

if TYPE_CHECKING:
    from cudnn_jax.graph.tensor import Tensor

OPERATIONS: dict[str, Operation] = {**POINTWISE, **STRUCTURED, **CAPTURED}
WRITTEN_OUT = ("matmul",)
GENERATED = {name: operation for name, operation in OPERATIONS.items() if name not in WRITTEN_OUT}


def signature(operation: Operation) -> inspect.Signature:
    """The builder's signature, annotations as text."""
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    placed = [_parameter(operation, name, first.kind) for name in operation.arguments]
    named = [_parameter(operation, name, inspect.Parameter.KEYWORD_ONLY) for name in operation.keyword_only]
    return inspect.Signature([first, *placed, *named], return_annotation=_returns(operation))


def _parameter(operation: Operation, name: str, kind: Any) -> inspect.Parameter:
    annotation, default = _annotated(operation, name)
    return inspect.Parameter(name, kind, annotation=annotation, default=default)


def _annotated(operation: Operation, name: str) -> tuple[str, Any]:
    if name == "name":
        return "str", ""
    if name == "compute_data_type":
        return "Any", None
    if name in operation.expand:
        return "Sequence[Any] | None", None
    for port in operation.inputs:
        if port.name == name:
            kind = "Tensor | float" if port.number else "Tensor"
            return (f"{kind} | None", None) if port.optional else (kind, inspect.Parameter.empty)
    for attribute in operation.attributes:
        if attribute.name == name:
            annotation = attribute.kind.annotation
            if attribute.required:
                return annotation.removesuffix(" | None"), inspect.Parameter.empty
            widened = attribute.default is None and not annotation.endswith("None")
            return f"{annotation} | None" if widened else annotation, attribute.default
    return "Tensor | None", None


def _returns(operation: Operation) -> str:
    made = [output for output in operation.outputs if not output.from_caller]
    kinds = ["Tensor" if output.when is None else "Tensor | None" for output in made]
    return kinds[0] if len(kinds) == 1 else f"tuple[{', '.join(kinds)}]"


def documentation(operation: Operation) -> str:
    """The builder's docstring."""
    docs = {port.name: port.doc for port in operation.inputs}
    docs |= {attribute.name: attribute.doc for attribute in operation.attributes}
    docs |= {output.name: f"Output that the caller makes. {output.doc}" for output in operation.outputs}
    docs |= {"compute_data_type": "Type to compute in; the graph's if absent.", "name": "The node's name."}
    names = (*operation.arguments, *operation.keyword_only)
    made = [output for output in operation.outputs if not output.from_caller]
    lines = [f"{operation.summary}", "", "Args:"]
    lines += [f"  {name}: {docs[name] or 'Tensor.'}" for name in names]
    lines += ["", "Returns:"]
    lines += [f"  {out.name}: {out.doc}{' None unless asked for.' if out.when else ''}" for out in made]
    return "\n".join(lines)


def builder(operation: Operation) -> Any:
    """The method that adds this operation to a graph."""

    def build(self: Any, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        made: Tensor | tuple[Tensor | None, ...] = self._add(operation, args, kwargs)
        return made

    build.__name__ = operation.name
    build.__qualname__ = f"pygraph.{operation.name}"
    build.__doc__ = documentation(operation)
    build.__signature__ = signature(operation)  # type: ignore[attr-defined]
    return build
