"""The plan of tiles: blocks cover a side, and a query block visits the key blocks that it sees and no others."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from cudnn_jax.engines.sdpa._tiling import Band, Blocks, choose
from support.attention.oracle import visible

LENGTHS = [1, 7, 16, 24, 97, 128, 192, 255, 256, 257, 1000, 1024, 5000]


@pytest.mark.parametrize("most", [1, 24, 128, 500])
@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_cover_a_side_without_leaving_it(length, most):
    blocks = Blocks.cut(length, most)
    starts = [int(blocks.start(i)) for i in range(blocks.count)]
    covered = np.concatenate([np.arange(start, start + blocks.size) for start in starts])
    assert blocks.size <= max(most, 1)
    assert set(covered.tolist()) == set(range(length))
    assert (len(covered) != length) == blocks.ragged
    assert blocks.count * blocks.size - length < blocks.size


def test_blocks_prefer_a_divisor():
    assert Blocks.cut(5000, 512).size % 16 == 0
    assert not Blocks.cut(1536, 500).ragged
    assert not Blocks.cut(16384, 256).ragged


def band(t, s, left, right, alignment, lengths=None, tiles=(24, 40)):
    facts = types.SimpleNamespace(alignment=alignment, left=left, right=right)
    given = (None, None) if lengths is None else (jnp.asarray(x, jnp.int32).reshape(-1, 1, 1, 1) for x in lengths)
    return Band.of(facts, Blocks.cut(t, tiles[0]), Blocks.cut(s, tiles[1]), *given)


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("left,right", [(None, None), (None, 0), (2, 0), (30, 5), (None, 7), (9, None), (2**31 - 2, 0)])
@pytest.mark.parametrize("t,s", [(97, 192), (192, 97), (128, 128), (300, 40)])
@pytest.mark.parametrize("lengths", [None, ((50, 90), (33, 20)), ((0, 7), (0, 31)), ((97, 12), (40, 40))])
def test_a_query_block_visits_what_it_sees(t, s, left, right, alignment, lengths):
    plan = band(t, s, left, right, alignment, lengths)
    pairs = [(t, s)] if lengths is None else list(zip(*lengths, strict=True))
    options = dict(left=left, right=right, alignment=alignment)
    seen = np.stack([visible(t, s, **options, q_length=q, kv_length=kv) for q, kv in pairs])
    ranges = plan.key_ranges()
    for i in range(int(plan.row_blocks())):
        top = int(plan.rows.start(i))
        rows = seen[:, top : top + plan.rows.size]
        first, end = (0, plan.keys.count) if ranges is None else (int(side[i]) for side in ranges)
        assert not rows[:, :, : first * plan.keys.size].any()
        assert not rows[:, :, end * plan.keys.size :].any()
        if lengths is None and plan.keys.count > 1:
            visited = [rows[:, :, j * plan.keys.size : (j + 1) * plan.keys.size].any() for j in range(first, end)]
            assert all(visited)
    assert not seen[:, int(plan.row_blocks()) * plan.rows.size :].any()


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_a_tile_keeps_each_visible_entry_once(alignment):
    plan = band(97, 150, 30, 5, alignment, ((60, 97), (150, 33)))
    count = np.zeros((2, 97, 150), int)
    for i in range(plan.rows.count):
        for j in range(plan.keys.count):
            kept = np.array(
                jnp.broadcast_to(plan.keep(i, j) & plan.valid_rows(i), (2, 1, 1, plan.rows.size, plan.keys.size))
            )
            kept[:, :, :, : i * plan.rows.size - int(plan.rows.start(i))] = False
            top, low = int(plan.rows.start(i)), int(plan.keys.start(j))
            count[:, top : top + plan.rows.size, low : low + plan.keys.size] += kept[:, 0, 0]
    options = dict(left=30, right=5, alignment=alignment)
    seen = np.stack([visible(97, 150, **options, q_length=q, kv_length=k) for q, k in ((60, 150), (97, 33))])
    np.testing.assert_array_equal(count, seen)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "batch,heads,t,s", [(1, 1, 1, 1), (1, 8, 1, 65536), (256, 16, 64, 64), (1, 1, 16384, 16384), (64, 64, 8192, 8192)]
)
def test_tiles_are_bounded_whatever_the_lengths(platform, batch, heads, t, s):
    facts = types.SimpleNamespace(batch=batch, q_heads=heads, q_len=t, kv_len=s)
    rows, keys = choose(facts, platform)
    budget = {"cpu": 2**21, "cuda": 2**25}[platform]
    assert 1 <= min(rows, t) * min(keys, s) <= max(128 * 128, budget // (batch * heads))
    assert min(rows, t) * min(keys, s) >= min(t * s, 64 * 64)
