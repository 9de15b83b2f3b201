"""The tables against the surface that they have to match, and the methods made from them."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from cudnn_jax.graph import OPERATIONS, pygraph, stubs

SURFACE = json.loads(Path(__file__).with_name("op_surface.json").read_text())
CAPTURED = SURFACE["captured"]


def test_the_pointwise_table_is_the_surface() -> None:
    ours = {name: [p.name for p in op.inputs] for name, op in OPERATIONS.items() if op.type == "POINTWISE"}
    assert ours == SURFACE["pointwise"]
    assert len(ours) == 54


def test_pointwise_attributes_are_the_surfaces() -> None:
    used = {a.name for op in OPERATIONS.values() if op.type == "POINTWISE" for a in op.attributes}
    assert used == set(SURFACE["pointwise_scalar_attributes"])


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_entry_has_the_surfaces_keywords_in_order(name: str) -> None:
    facts, operation = CAPTURED[name], OPERATIONS[name]
    assert list(operation.arguments) == facts["kwargs"]
    python_only = [*facts.get("python_only_in_kwargs", []), *facts["python_only_attrs"]]
    python_only += facts.get("python_only_out_kwargs", [])
    extra = ["dStats"] if name == "sdpa_backward" else []
    assert list(operation.keyword_only) == extra + python_only


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_entry_tells_inputs_from_outputs(name: str) -> None:
    facts, operation = CAPTURED[name], OPERATIONS[name]
    required = [port.name for port in operation.inputs if not port.optional]
    assert required == facts["pos"]
    assert [output.name for output in operation.outputs if not output.from_caller] == facts["outputs"]
    assert {output.name for output in operation.outputs if output.from_caller} == set(facts["out_kwargs"])


@pytest.mark.parametrize("name", SURFACE["structured"])
def test_a_structured_entry_is_the_surfaces(name: str) -> None:
    facts, operation = SURFACE["structured"][name], OPERATIONS[name]
    assert [f"{port.name}{'[]' * port.many}" for port in operation.inputs] == facts["inputs"]
    assert [attribute.name for attribute in operation.attributes] == facts["attrs"]
    assert [output.name for output in operation.outputs] == facts["outputs"]
    assert [output.name for output in operation.outputs if output.when] == facts["conditional_outputs"]
    inputs = [name.removesuffix("[]") for name in facts["inputs"]]
    assert list(operation.arguments) == [*inputs, *facts["attrs"], "compute_data_type", "name"]


def test_the_surface_is_whole() -> None:
    named = {*SURFACE["pointwise"], *SURFACE["structured"], *SURFACE["captured"], "matmul"}
    assert named == set(OPERATIONS)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_entry_explains_each_keyword_once(operation) -> None:
    inputs = [port.name for port in operation.inputs if port.keyword and port.name not in operation.expand]
    attributes = [attribute.name for attribute in operation.attributes]
    given = [output.name for output in operation.outputs if output.from_caller]
    explained = [*inputs, *attributes, *given, "compute_data_type", "name"]
    assert sorted(explained) == sorted([*operation.arguments, *operation.keyword_only])


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_builder_has_its_own_signature_and_documentation(operation) -> None:
    method = getattr(pygraph(), operation.name)
    parameters = inspect.signature(method).parameters
    assert set(parameters) == {*operation.arguments, *operation.keyword_only}
    assert method.__name__ == operation.name
    assert method.__doc__.startswith(operation.summary)
    assert all(f"  {name}: " in inspect.cleandoc(method.__doc__) for name in parameters)
    assert all(f"  {out.name}: " in inspect.cleandoc(method.__doc__) for out in operation.outputs)
    needed = {name for name, p in parameters.items() if p.default is inspect.Parameter.empty}
    required = {port.name for port in operation.inputs if not port.optional}
    required |= {attribute.name for attribute in operation.attributes if attribute.required}
    # A signature cannot say that what stands behind an optional parameter is required.
    names = list(parameters)
    first_optional = next((at for at, name in enumerate(names) if name not in required), len(names))
    assert needed == required & set(names[:first_optional])
    assert all("None" in parameters[name].annotation for name in required - needed)


def test_the_stub_is_made_from_the_tables() -> None:
    assert stubs.PATH.read_text() == stubs.render(), "run python -m cudnn_jax.graph.stubs"


def test_the_tables_are_closed() -> None:
    with pytest.raises(TypeError):
        OPERATIONS["mine"] = OPERATIONS["add"]
    with pytest.raises(TypeError):
        OPERATIONS["add"].fixed["mode"] = "sub"
    with pytest.raises(TypeError):
        OPERATIONS["sdpa"].expand["bias"] = tuple
    with pytest.raises(AttributeError):
        OPERATIONS["add"].name = "sub"


WITHOUT_DERIVATIVE = {
    *("rmsnorm_backward", "layernorm_backward", "adalayernorm_backward", "instancenorm_backward"),
    *("batchnorm_backward", "sdpa_backward", "sdpa_fp8", "sdpa_fp8_backward", "sdpa_mxfp8", "sdpa_mxfp8_backward"),
    *("gdn_bwd", "kda_bwd", "gdn2_bwd"),
}


def test_every_other_operation_names_its_derivative() -> None:
    assert {name for name, operation in OPERATIONS.items() if operation.derivative is None} == WITHOUT_DERIVATIVE
