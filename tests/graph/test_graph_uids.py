"""Uids: unique always, a user's kept, an automatic one moved, two users' clash refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_jax.graph import GraphValidationError, pygraph


@pytest.fixture
def graph() -> pygraph:
    return pygraph(io_data_type="float32")


def test_automatic_uids_count_from_one(graph) -> None:
    x = graph.tensor((2,))
    y = graph.exp(x)
    assert (x.uid, y.uid) == (1, 2)


def test_a_users_uid_moves_an_automatic_one(graph) -> None:
    automatic = graph.tensor((2,), name="automatic")
    user = graph.tensor((2,), name="user", uid=automatic.uid)
    assert user.uid == 1 and automatic.uid != 1
    assert graph.tensor_of_uid(1) is user and graph.tensor_of_uid(automatic.uid) is automatic


def test_a_users_uid_moves_a_nodes_output(graph) -> None:
    out = graph.exp(graph.tensor((2,)))
    user = graph.tensor((2,)).set_uid(out.uid)
    assert user.uid == 2 and out.uid == 4


def test_two_users_clash(graph) -> None:
    graph.tensor((2,), name="first", uid=7)
    with pytest.raises(GraphValidationError, match="tensor 'second': uid 7 is taken by tensor 'first'"):
        graph.tensor((2,), name="second").set_uid(7)
    with pytest.raises(GraphValidationError, match="uid 7"):
        graph.tensor((2,), name="third", uid=7)
    assert [tensor.name for tensor in graph.tensors] == ["first", "second"]


def test_setting_the_same_uid_again_is_no_clash(graph) -> None:
    x = graph.tensor((2,), uid=7)
    x.uid = 7
    assert graph.tensor_of_uid(7) is x


def test_a_uid_given_up_is_free(graph) -> None:
    x = graph.tensor((2,), uid=7).set_uid(8)
    y = graph.tensor((2,), uid=7)
    assert (x.uid, y.uid) == (8, 7)


def test_zero_is_a_uid_and_stays_one(graph) -> None:
    bias, gradient = graph.tensor((1, 1, 1, 1)), graph.tensor((1, 1, 1, 1), uid=0)
    ports = {name: graph.tensor((1, 1, 1, 1)) for name in ("q", "k", "v", "o", "dO")}
    stats = graph.tensor((1, 1, 1, 1))
    graph.sdpa_backward(**ports, stats=stats, bias=bias, dBias=gradient)
    assert gradient.uid == 0 and graph.tensor_of_uid(0) is gradient
    assert len(graph.tensors) == len({tensor.uid for tensor in graph.tensors}) == 11


@pytest.mark.parametrize("uid", [-1, 2**63, 1.0, "1", True])
def test_what_is_no_uid_is_refused(graph, uid) -> None:
    with pytest.raises(GraphValidationError, match=r"tensor 'x': uid is .*; the rule: an integer, 0 to 2\*\*63 - 1"):
        graph.tensor((2,), name="x", uid=uid)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("tensor"), st.none()),
        st.tuples(st.just("tensor"), st.integers(0, 12)),
        st.tuples(st.just("exp"), st.integers(0, 20)),
        st.tuples(st.just("set"), st.tuples(st.integers(0, 20), st.integers(0, 12))),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(steps)
def test_uids_stay_unique_and_users_keep_theirs(steps) -> None:
    graph = pygraph(io_data_type="float32")
    wanted: dict[int, int] = {}  # position in graph.tensors -> the user's uid
    for step, argument in steps:
        made = len(graph.tensors)
        if step == "tensor":
            clash = argument in wanted.values()
            try:
                graph.tensor((2,), uid=argument)
            except GraphValidationError:
                assert clash
            else:
                assert argument is None or not clash
                if argument is not None:
                    wanted[made] = argument
        elif step == "exp" and made:
            graph.exp(graph.tensors[argument % made])
        elif step == "set" and made:
            position, uid = argument[0] % made, argument[1]
            clash = uid in {other for index, other in wanted.items() if index != position}
            try:
                graph.tensors[position].uid = uid
            except GraphValidationError:
                assert clash
            else:
                assert not clash
                wanted[position] = uid
        uids = [tensor.uid for tensor in graph.tensors]
        assert len(set(uids)) == len(uids)
        assert all(uids[position] == uid for position, uid in wanted.items())
        assert all(graph.tensor_of_uid(tensor.uid) is tensor for tensor in graph.tensors)
