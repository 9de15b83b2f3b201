"""The contract of dispatch, with stand-in engines injected through the manifest. No arithmetic is checked here."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from typing import Any, ClassVar

import pytest

from cudnn_jax import _ffi
from cudnn_jax.engines import backend, backend_compared, cutedsl, cutile, ids, manifest, planning, versions
from cudnn_jax.engines.base import BaseEngine, Inline, PlanConfig
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.sdpa import facts as sdpa_facts
from cudnn_jax.engines.sdpa import heuristics
from cudnn_jax.engines.target import CPU, Target
from cudnn_jax.graph import GraphNotSupportedError, data_type
from support.standin import family

BUILT: list[str] = []


class _StandIn(BaseEngine):
    kind = "test"
    knob_settings: tuple[Any, ...] = ((),)
    check_error: Exception | None = None
    build_error: Exception | None = None

    def configs(self, graph: Any, facts: Any, target: Target) -> Any:
        if self.check_error:
            raise self.check_error
        return self.knob_settings

    def build_plan(self, graph: Any, facts: Any, config: PlanConfig, target: Target) -> Any:
        BUILT.append(config.name)
        if self.build_error:
            raise self.build_error
        return Inline(lambda *arrays: arrays)


class First(_StandIn):
    name = "first"


class Tiled(_StandIn):
    name = "tiled"
    knob_settings = ((("tile", 128),), (("tile", 64),), (("tile", 128),))


class DeclinesCheck(_StandIn):
    name = "declines-check"
    check_error = GraphNotSupportedError("head_dim 64, serves 128")


class MissingDsl(_StandIn):
    name = "missing-dsl"
    build_error = ImportError("No module named 'some_dsl'")


class NotBuilt(_StandIn):
    name = "not-built"
    build_error = NotImplementedError("tile 64, serves 128")


class Buggy(_StandIn):
    name = "buggy"
    build_error = KeyError("a bug")


class BuggyCheck(_StandIn):
    name = "buggy-check"
    check_error = ZeroDivisionError("a bug")


class NeedsDsl(_StandIn):
    name = "needs-dsl"
    dsl: Any = None

    def configs(self, graph: Any, facts: Any, target: Target) -> Any:
        self.dsl.available()
        return [()]


def slot(number: int, engine: type[_StandIn], **options: Any) -> manifest.EngineSlot:
    return manifest.EngineSlot(number, engine.name, (__name__, engine.__name__), **options)


def attention(**options: Any) -> pygraph:
    graph = pygraph(io_data_type=data_type.FLOAT)
    q, k, v = (graph.tensor(dim=(2, 4, 16, 32), name=name) for name in "qkv")
    out, _ = graph.sdpa(q, k, v, generate_stats=False, **options)
    out.set_output(True)
    return graph


def planned(graph: pygraph | None = None, **options: Any) -> pygraph:
    graph = graph or attention()
    graph.create_execution_plans(target=CPU, **options)
    return graph


def reasons(graph: pygraph) -> dict[str, str]:
    return {decline.engine: decline.reason for decline in graph.declines}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    BUILT.clear()
    planning.clear_memo()


def test_the_reference_engine_serves_and_ranks_last(monkeypatch: pytest.MonkeyPatch) -> None:
    with family(monkeypatch, "sdpa_fwd", slot(1, First)):
        graph = planned()
    assert [plan.engine for plan in graph.plans] == ["first", "xla"]
    assert graph.plans[-1].engine_id == ids.engine_id("sdpa_fwd", ids.REFERENCE_SLOT) == 20_599
    assert "platform cpu" in reasons(graph)["cudnn"]


def test_plans_are_unique_by_engine_id_and_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    with family(monkeypatch, "sdpa_fwd", slot(1, Tiled)):
        graph = planned()
    assert [plan.name for plan in graph.plans] == ["tiled:tile=128", "tiled:tile=64", "xla"]


def test_a_decline_at_check_keeps_an_engine_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with family(monkeypatch, "sdpa_fwd", slot(1, DeclinesCheck)):
        graph = planned()
    assert [plan.engine for plan in graph.plans] == ["xla"]
    assert reasons(graph)["declines-check"] == "head_dim 64, serves 128"


@pytest.mark.parametrize("engine", [MissingDsl, NotBuilt])
def test_a_decline_at_build_moves_on(monkeypatch: pytest.MonkeyPatch, engine: type[_StandIn]) -> None:
    with family(monkeypatch, "sdpa_fwd", slot(1, engine)):
        graph = planned()
        config, _ = graph.build_plans()
    assert config.engine == "xla"
    assert BUILT == [engine.name]
    assert reasons(graph)[engine.name] == str(engine.build_error)


@pytest.mark.parametrize("engine", [Buggy, BuggyCheck])
def test_any_other_exception_is_a_bug_and_propagates(monkeypatch: pytest.MonkeyPatch, engine: type[_StandIn]) -> None:
    expected = type(engine.build_error or engine.check_error)
    with family(monkeypatch, "sdpa_fwd", slot(1, engine)), pytest.raises(expected, match="a bug"):
        planned().build_plans()


def test_a_pinned_decline_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with family(monkeypatch, "sdpa_fwd", slot(1, NotBuilt)):
        graph = planned()
        graph.select_plan(0)
        with pytest.raises(
            GraphNotSupportedError, match="pinned plan not-built cannot serve(.|\n)*tile 64, serves 128"
        ):
            graph.build_plans()
    assert BUILT == ["not-built"]


def test_a_pinned_plan_is_the_one_that_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    with family(monkeypatch, "sdpa_fwd", slot(1, Tiled)):
        graph = planned()
        graph.select_plan(1)
        config, _ = graph.build_plans()
    assert config.name == "tiled:tile=64"
    with pytest.raises(IndexError, match="3 plans"):
        graph.select_plan(3)


def test_when_nothing_builds_the_error_holds_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        family(monkeypatch, "sdpa_fwd", slot(1, NotBuilt), slot(2, MissingDsl), slot(3, DeclinesCheck)),
        monkeypatch.context() as patch,
    ):
        own = manifest.FAMILIES["sdpa_fwd"]
        patch.setitem(manifest.FAMILIES, "sdpa_fwd", manifest.EngineFamily(**{**own.__dict__, "slots": own.slots[:-1]}))
        with pytest.raises(GraphNotSupportedError) as error:
            planned().build_plans()
    for line in ("not-built: tile 64", "missing-dsl: No module", "declines-check: head_dim 64", "cudnn: platform cpu"):
        assert line in str(error.value)


def test_when_nothing_plans_the_graph_the_error_holds_every_reason() -> None:
    graph = attention()
    with pytest.raises(
        GraphNotSupportedError, match=r"^implementation='cudnn' cannot serve fwd .*\n  cudnn: platform cpu"
    ):
        planned(graph, implementation="cudnn")
    assert graph.plans == () and reasons(graph) == {"cudnn": "platform cpu, serves cuda"}
    with pytest.raises(RuntimeError, match="planned once"):
        planned(graph)


@pytest.mark.parametrize("wanted", ["tiled", "test", "tiled:tile=64"])
def test_implementation_names_a_kind_an_engine_or_a_plan(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    with family(monkeypatch, "sdpa_fwd", slot(1, Tiled)):
        config, _ = planned(implementation=wanted).build_plans()
    assert config.name == ("tiled:tile=64" if wanted.endswith("64") else "tiled:tile=128")


def test_a_named_engine_that_declines_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with family(monkeypatch, "sdpa_fwd", slot(1, DeclinesCheck)):
        with pytest.raises(GraphNotSupportedError, match="implementation='declines-check'(.|\n)*serves 128"):
            planned(implementation="declines-check").build_plans()
        with pytest.raises(GraphNotSupportedError, match="implementation='cudnn'(.|\n)*cudnn: platform cpu"):
            planned(implementation="cudnn").build_plans()
        with pytest.raises(GraphNotSupportedError, match="implementation='no-such-engine'"):
            planned(implementation="no-such-engine").build_plans()


def test_a_name_that_nothing_has_leaves_the_graph_to_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = attention()
    with family(monkeypatch, "sdpa_fwd", slot(1, Tiled)):
        with pytest.raises(GraphNotSupportedError, match="; the rule: None, one of cudnn, test, tiled, xla, or a plan"):
            planned(graph, implementation="nonsense")
        assert planned(graph, implementation="tiled").get_execution_plan_count() == 2
        with pytest.raises(GraphNotSupportedError, match="it is no plan of tiled, which has tiled:tile=128, tiled:til"):
            planned(implementation="tiled:tile=1").build_plans()
        with monkeypatch.context() as patch, pytest.raises(GraphNotSupportedError, match="tile 64, serves 128"):
            patch.setattr(Tiled, "build_error", NotBuilt.build_error)
            planned(implementation="tiled:tile=64").build_plans()


def test_opt_in_is_read_live(monkeypatch: pytest.MonkeyPatch) -> None:
    with family(monkeypatch, "sdpa_fwd", slot(1, First, opt_in="CUDNN_JAX_TEST_FIRST")):
        graph = planned()
        assert [plan.engine for plan in graph.plans] == ["xla"]
        assert "CUDNN_JAX_TEST_FIRST=1" in reasons(graph)["first"]
        assert planning.plan(attention(), CPU).plan.engine == "xla"
        monkeypatch.setenv("CUDNN_JAX_TEST_FIRST", "1")
        assert planning.plan(attention(), CPU).plan.engine == "first"


def test_planning_is_one_shot_and_freezes() -> None:
    graph = planned()
    with pytest.raises(RuntimeError, match="planned once"):
        graph.create_execution_plans()
    with pytest.raises(Exception, match="frozen"):
        graph.tensor(dim=(1, 1, 1, 1))
    with pytest.raises(RuntimeError, match="create_execution_plans first"):
        _ = attention().plans


def test_equal_graphs_are_planned_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with family(monkeypatch, "sdpa_fwd", slot(1, First)):
        first = planning.plan(attention(), CPU)
        assert planning.plan(attention(), CPU) is first
        assert planning.plan(attention(use_causal_mask=True), CPU) is not first
        assert planning.plan(attention(), CPU, "xla") is not first
    assert BUILT == ["first", "first"]


def test_a_graph_of_two_families_belongs_to_none_and_runs_node_by_node() -> None:
    graph = attention()
    assert manifest.family_for(graph).name == "sdpa_fwd"  # type: ignore[union-attr]
    q, k, v, o, d_out = (graph.tensor(dim=(2, 4, 16, 32)) for _ in range(5))
    stats = graph.tensor(dim=(2, 4, 16, 1), data_type=data_type.FLOAT)
    for gradient in graph.sdpa_backward(q, k, v, o, d_out, stats):
        gradient.set_output(True)
    assert manifest.family_for(graph) is None
    config, _ = planned(graph).build_plans()
    assert config.engine_id == ids.engine_id("generic", ids.REFERENCE_SLOT) == 21_999
    assert reasons(graph)["cudnn"] == "platform cpu, serves cuda"


def test_a_graph_of_two_nodes_of_one_family_belongs_to_none() -> None:
    graph = pygraph(io_data_type=data_type.FLOAT)
    x = graph.tensor((2, 3))
    for _ in range(2):
        x, _ = graph.rmsnorm(x, epsilon=0.5, norm_forward_phase="INFERENCE")
    x.set_output(True)
    assert manifest.family_for(graph) is None
    config, _ = planned(graph).build_plans()
    assert config.engine_id == 21_999


def test_plans_of_what_was_not_compared_are_opt_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lowered:
        def plan_count(self) -> int:
            return 0

        def create_execution_plans(self, mode: str) -> None:
            pass

    monkeypatch.setattr(backend._ffi, "BackendGraph", lambda *_: Lowered())
    monkeypatch.setattr(backend.libraries, "locate", lambda: None)
    one, two, fold = (pygraph(io_data_type=data_type.FLOAT) for _ in range(3))
    for graph, products in ((one, 1), (two, 2)):
        for _ in range(products):
            graph.matmul(graph.tensor((1, 2, 3)), graph.tensor((1, 3, 2))).set_output(True)
    fold.reduction(fold.tensor((2, 3)), mode="ADD").set_dim((2, 1)).set_output(True)
    monkeypatch.setattr(backend_compared, "NOT_COMPARED", frozenset({"REDUCTION"}))

    def refused(graph: pygraph) -> str | None:
        session, _, declines = backend.propose(graph, CPU, ("A",), {})
        return declines[0].reason.partition(":")[0] if session is None else None

    expected = [None, "a graph of 2 products", "node type REDUCTION"]
    assert [refused(graph) for graph in (one, two, fold)] == expected
    monkeypatch.setenv("CUDNN_JAX_CUDNN_UNPROVEN", "1")
    assert [refused(graph) for graph in (one, two, fold)] == [None, None, None]


def test_the_generic_reference_ranks_behind_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a graph has no family, and where the family's own reference cannot express it."""
    plan = PlanConfig(4, engine="cudnn", kind="cudnn", mode="A")
    monkeypatch.setattr(backend, "propose", lambda *_: (None, [plan], []))
    monkeypatch.setattr(backend, "out_of_reach", lambda target: None)
    shapes, folds = (pygraph(io_data_type=data_type.FLOAT) for _ in range(2))
    shapes.transpose(shapes.tensor((2, 3)), (1, 0)).set_output(True)
    folds.reduction(folds.tensor((2, 3, 4)), mode="ADD").set_dim((2, 1, 4)).set_output(True)
    for graph in (shapes, folds):
        assert [each.engine_id for each in planned(graph).plans] == [4, 21_999]


def test_a_graph_with_pointwise_nodes_around_attention_is_still_attention() -> None:
    graph = pygraph(io_data_type=data_type.FLOAT)
    q, k, v = (graph.tensor(dim=(2, 4, 16, 32)) for _ in range(3))
    out, _ = graph.sdpa(graph.relu(q), k, v, generate_stats=False)
    out.set_output(True)
    assert manifest.family_for(graph).name == "sdpa_fwd"  # type: ignore[union-attr]
    graph.create_execution_plans(target=CPU)
    assert "cannot express" in reasons(graph)["xla"]
    assert [plan.engine_id for plan in graph.plans] == [21_999]


def test_engine_ids_decode_to_one_family_and_slot() -> None:
    for name, base in ids.FAMILY_BLOCKS.items():
        assert ids.decode(base + 7) == (name, 7)
    assert ids.decode(4) == ("backend", 4)
    assert len(set(ids.FAMILY_BLOCKS.values())) == len(ids.FAMILY_BLOCKS)
    family_of, slot_of = manifest.engine_for_id(20_699)
    assert (family_of.name, slot_of.name) == ("sdpa_bwd", "xla")
    with pytest.raises(ValueError, match="names no engine"):
        manifest.engine_for_id(20_501)
    with pytest.raises(ValueError, match="no family"):
        ids.decode(15_000)


def test_every_slot_of_the_manifest_resolves_to_its_engine() -> None:
    for each in manifest.FAMILIES.values():
        for entry in each.slots:
            engine = manifest.instantiate(each, entry)
            assert (engine.name, engine.engine_id) == (entry.name, ids.engine_id(each.name, entry.slot))


# Ranking by mode


@dataclasses.dataclass
class Session:
    """cuDNN's side with plans made up, each built to an inline function."""

    plans: list[PlanConfig]

    def build(self, config: PlanConfig, *, pinned: bool = False) -> Inline:
        BUILT.append(config.name)
        return Inline(lambda *arrays: arrays[:1])


def cudnn(number: int, mode: str) -> PlanConfig:
    return PlanConfig(number, (("k", 1),), engine="cudnn", kind="cudnn", mode=mode)


@pytest.fixture
def backend_plans(monkeypatch: pytest.MonkeyPatch) -> list[PlanConfig]:
    """Stands in for cuDNN; only plans of the modes that are asked for come."""
    plans = [cudnn(1, "A"), cudnn(2, "A"), cudnn(3, "FALLBACK")]

    def propose(graph: Any, target: Target, modes: Any, words: Any) -> Any:
        return Session(plans), [plan for plan in plans if plan.mode in modes], []

    monkeypatch.setattr(backend, "out_of_reach", lambda target: None)
    monkeypatch.setattr("cudnn_jax.engines.sdpa.backend_limits.mismatch", lambda *_: None)
    monkeypatch.setattr(backend, "propose", propose)
    return plans


OURS, LAST = ["tiled:tile=128", "tiled:tile=64"], ["xla"]
A, FALLBACK = ["cudnn/1:k=1", "cudnn/2:k=1"], ["cudnn/3:k=1"]


@pytest.mark.parametrize(
    ("modes", "ranked", "tags"),
    [
        (("A", "FALLBACK"), [*OURS, *A, *FALLBACK, *LAST], "A A A A FALLBACK FALLBACK"),
        (("FALLBACK", "A"), [*FALLBACK, *OURS, *A, *LAST], "FALLBACK A A A A A"),
        (("OPENSOURCE",), [*OURS, *LAST], "OPENSOURCE OPENSOURCE OPENSOURCE"),
        (
            ("OPENSOURCE", "A", "FALLBACK"),
            [*OURS, *A, *FALLBACK, *LAST],
            "OPENSOURCE OPENSOURCE A A FALLBACK FALLBACK",
        ),
        (("A", "A"), [*OURS, *A, *LAST], "A A A A A"),
        (("FALLBACK",), [*FALLBACK, *LAST], "FALLBACK FALLBACK"),
        (("B",), [*OURS, *LAST], "B B B"),
    ],
)
@pytest.mark.usefixtures("backend_plans")
def test_a_list_is_ranked_mode_by_mode_and_entries_carry_theirs(
    monkeypatch: pytest.MonkeyPatch, modes: tuple[str, ...], ranked: list[str], tags: str
) -> None:
    with family(monkeypatch, "sdpa_fwd", slot(1, Tiled)):
        graph = planned(modes=modes)
        assert [plan.name for plan in graph.plans] == ranked
        assert [plan.mode for plan in graph.plans] == tags.split()
        assert graph.build_plans()[0].name == ranked[0]


def test_a_family_without_a_hook_lists_what_accepts_and_then_the_backend(
    monkeypatch: pytest.MonkeyPatch, backend_plans: list[PlanConfig]
) -> None:
    slots = (slot(1, DeclinesCheck), slot(2, First), slot(3, Tiled))
    with family(monkeypatch, "sdpa_fwd", *slots, heuristics=None):
        graph = planned(modes=("OPENSOURCE", "A"))
    assert [plan.name for plan in graph.plans] == ["first", *OURS, *LAST, *A]
    assert [plan.mode for plan in graph.plans] == ["OPENSOURCE"] * 4 + ["A"] * 2
    assert reasons(graph)["declines-check"] == "head_dim 64, serves 128"


@pytest.mark.usefixtures("backend_plans")
def test_a_mode_without_plans_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = planned(modes=("B", "A"))
    assert [plan.name for plan in graph.plans] == [*A, *LAST]
    graph = planned(modes=("B",))
    assert [plan.name for plan in graph.plans] == LAST and graph.build_plans()[0].name == "xla"
    with pytest.raises(GraphNotSupportedError, match="implementation='cudnn' cannot serve"):
        planned(modes=("B",), implementation="cudnn").build_plans()


def test_the_frontends_open_source_engines_are_told_to_be_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lowered:
        asked: ClassVar[list[str]] = []

        def __init__(self, *_: Any) -> None:
            pass

        def plan_count(self) -> int:
            return 0

        def create_execution_plans(self, mode: str) -> int:
            self.asked.append(mode)
            return 0

    monkeypatch.setattr(_ffi, "BackendGraph", Lowered)
    graph = attention()
    graph.freeze()
    for modes, told in ((("OPENSOURCE", "A"), ["mode OPENSOURCE"]), (("A",), [])):
        session, plans, declines = backend.propose(graph, CPU, modes, {})
        assert session is not None and plans == []
        assert [decline.reason.split(":")[0] for decline in declines] == told
    assert Lowered.asked == ["A", "A"]


# Facts, and a DSL that is too old


def test_facts_are_parsed_once_and_shared_by_ranking_and_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    analyze, recommend = sdpa_facts.analyze, heuristics.recommend
    parsed: list[Any] = []

    def parse(graph: Any) -> Any:
        parsed.append(analyze(graph))
        return parsed[-1]

    def rank(modes: Any, facts: Any, *rest: Any) -> Any:
        seen.append(facts)
        return recommend(modes, facts, *rest)

    def note(self: Any, graph: Any, facts: Any, *rest: Any) -> Any:
        seen.append(facts)
        return [()] if len(rest) == 1 else Inline(lambda *arrays: arrays[:1])

    monkeypatch.setattr(sdpa_facts, "analyze", parse)
    monkeypatch.setattr(heuristics, "recommend", rank)
    for engine in (First, Tiled):
        monkeypatch.setattr(engine, "configs", note)
        monkeypatch.setattr(engine, "build_plan", note)
    graph = attention()
    with family(monkeypatch, "sdpa_fwd", slot(1, First), slot(2, Tiled)):
        planning.plan(graph, CPU)
        planning.clear_memo()
        planning.plan(graph, CPU)  # of one frozen graph, however often it is planned
        own = manifest.FAMILIES["sdpa_fwd"]
        assert manifest.facts_of(graph, own) is parsed[0] and manifest.facts_of(graph, None) is None
    assert len(parsed) == 1 and len(seen) == 8 and all(facts is parsed[0] for facts in seen)


def test_facts_of_a_graph_that_can_change_are_not_kept() -> None:
    graph, own = attention(), manifest.FAMILIES["sdpa_fwd"]
    assert manifest.facts_of(graph, own).dtype is data_type.FLOAT
    for tensor in graph.inputs:
        tensor.set_data_type(data_type.HALF)
    assert manifest.facts_of(graph, own).dtype is data_type.HALF
    graph.freeze()
    assert manifest.facts_of(graph, own) is manifest.facts_of(graph, own)


@pytest.mark.parametrize("dsl", ["cutedsl", "cutile"])
def test_a_dsl_older_than_the_minimum_is_a_decline(dsl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"cutedsl": cutedsl, "cutile": cutile}[dsl]
    loaded = set(sys.modules)
    monkeypatch.setattr(NeedsDsl, "dsl", module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2.3")
    monkeypatch.setattr(versions, "cutedsl", lambda: "1.2.3")
    with family(monkeypatch, "sdpa_fwd", slot(1, NeedsDsl)):
        graph = planned()
    assert [plan.name for plan in graph.plans] == LAST
    assert " 1.2.3, " in reasons(graph)["needs-dsl"]
    assert not {name for name in sys.modules if name in ("cutlass", "cuda.tile")} - loaded
