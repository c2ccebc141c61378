# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest

from kvxfer.hits import CacheGroup, Coordinator
from kvxfer.scheduler.chunk_planner import ChunkPlanner

FULL16, FULL64 = CacheGroup("full", 16, spec_id="f"), CacheGroup("full", 64, spec_id="f")
OTHER16 = CacheGroup("full", 16, spec_id="g")
WINDOW16 = CacheGroup("sliding_window", 16, window_tokens=32, spec_id="w")
MAMBA64 = CacheGroup("mamba", 64, spec_id="m")
WINDOW64 = CacheGroup("sliding_window", 64, window_tokens=32, spec_id="w")
EAGLE64 = CacheGroup("sliding_window", 64, window_tokens=128, eagle=True, spec_id="e")
CHUNKED = CacheGroup("chunked_local", 64, chunk_tokens=64, spec_id="c")
SCRATCH = CacheGroup("full", 16, cacheable=False)


def request(num_tokens, hash_tokens=16, prompt=None):
    hashes = [f"{i:04}".encode().ljust(32, b".") for i in range(num_tokens // hash_tokens)]
    return SimpleNamespace(
        block_hashes=hashes, num_prompt_tokens=prompt or num_tokens, num_tokens=num_tokens
    )


def planner(*groups, block_tokens=16, **options):
    return ChunkPlanner(Coordinator(groups, 16, block_tokens, **options))


def listed(chunks):
    """Return {group: [(block id, index of the hash)]}."""
    return {
        part.group: [
            (block, int(part.hashes[i * 32 : i * 32 + 4]))
            for i, block in enumerate(part.block_ids.tolist())
        ]
        for part in chunks
    }


def table(num, base):
    return [base + i for i in range(num)]


def test_load_of_full_attention_starts_after_the_local_hit():
    found = planner(FULL16).loads(request(65), [table(5, 10)], 16, 64, {})
    assert listed(found) == {0: [(11, 1), (12, 2), (13, 3)]}


def test_load_of_a_window_takes_its_last_blocks_only():
    tables = [table(6, 10), [0, 0, 0, 23, 24, 25]]
    found = planner(FULL16, WINDOW16).loads(request(96), tables, 0, 80, {})
    assert listed(found) == {
        0: [(10, 0), (11, 1), (12, 2), (13, 3), (14, 4)],
        1: [(23, 3), (24, 4)],
    }


def test_load_of_a_recurrent_group_takes_the_state_at_the_hit():
    tables = [table(13, 10), [0, 0, 42]]
    found = planner(FULL16, MAMBA64, block_tokens=64).loads(request(200), tables, 64, 192, {})
    assert listed(found)[1] == [(42, 11)]
    assert [idx for _, idx in listed(found)[0]] == list(range(4, 12))


@pytest.mark.parametrize(
    "window_table", [[0] * 6, [0, 0, 0, 0, 24, 0], table(3, 20)], ids=["null", "one_null", "short"]
)
def test_load_into_blocks_that_the_hit_does_not_have_is_none(window_table):
    plan = planner(FULL16, WINDOW16)
    assert plan.loads(request(97), [table(6, 1), window_table], 0, 96, {}) is None


def test_load_to_what_is_no_boundary_is_none():
    assert planner(FULL16).loads(request(65), [table(5, 10)], 0, 40, {}) is None


def test_load_below_the_block_takes_the_tail_under_its_own_boundary():
    found = planner(FULL64, block_tokens=64, partial_hits=True).loads(
        request(120), [[5, 6]], 0, 96, {0: 112}
    )
    assert listed(found) == {0: [(5, 3), (6, 6)]}


def test_load_below_the_block_without_another_boundary_ends_at_the_hit():
    found = planner(FULL64, block_tokens=64, partial_hits=True).loads(
        request(120), [[5, 6]], 0, 112, {}
    )
    assert listed(found) == {0: [(5, 3), (6, 6)]}


def test_save_of_full_attention_takes_every_block():
    found = planner(FULL16).saves(request(64), [table(4, 10)], 16, 64)
    assert listed(found) == {0: [(11, 1), (12, 2), (13, 3)]}


def test_save_skips_groups_that_are_not_cacheable():
    found = planner(FULL16, SCRATCH).saves(request(32), [table(2, 10), table(2, 20)], 0, 32)
    assert list(listed(found)) == [0]


def test_save_of_a_window_skips_blocks_that_fell_out_of_it():
    tables = [table(4, 10), [0, 21, 22, 23]]
    found = planner(FULL16, WINDOW16).saves(request(65), tables, 0, 64)
    assert listed(found)[1] == [(21, 1), (22, 2), (23, 3)]


def test_save_never_takes_a_recurrent_state_by_its_place():
    tables = [table(8, 10), [31, 32]]
    found = planner(FULL16, MAMBA64, block_tokens=64).saves(request(128), tables, 0, 128)
    assert list(listed(found)) == [0]


def test_handed_state_is_keyed_at_the_tokens_that_it_covers():
    found = planner(FULL16, MAMBA64, block_tokens=64).handed(request(200), [(1, 42, 192)])
    assert listed(found) == {1: [(42, 11)]}


@pytest.mark.parametrize("tokens", [0, 8, 208, -64], ids="tokens={}".format)
def test_handed_state_without_a_hash_of_its_own_is_left_out(tokens):
    assert planner(FULL16, MAMBA64, block_tokens=64).handed(request(200), [(1, 42, tokens)]) == ()


def test_handed_null_block_is_left_out():
    assert planner(FULL16, MAMBA64, block_tokens=64).handed(request(200), [(1, 0, 192)]) == ()


def test_prompt_tail_runs_from_the_common_block_to_the_boundary():
    plan = planner(FULL16, MAMBA64, block_tokens=64, partial_hits=True)
    found = plan.prompt_tail(request(125), [table(8, 10), [0, 42]], 112, 125)
    assert listed(found) == {0: [(14, 4), (15, 5), (16, 6)]}


def test_prompt_tail_inside_a_block_is_keyed_at_the_boundary():
    plan = planner(FULL64, MAMBA64, block_tokens=64, partial_hits=True)
    found = plan.prompt_tail(request(125), [[10, 11], [0, 42]], 112, 125)
    assert listed(found) == {0: [(11, 6)]}


def test_prompt_tail_of_an_eagle_group_covers_what_the_search_reads_past_a_hit():
    eagle = CacheGroup("full", 16, eagle=True, spec_id="f")
    plan = planner(eagle, MAMBA64, block_tokens=64, partial_hits=True, use_eagle=True)
    tables = [table(8, 10), [0, 42]]
    assert listed(plan.prompt_tail(request(125), tables, 96, 125)) == {
        0: [(14, 4), (15, 5), (16, 6)]
    }
    assert plan.prompt_tail(request(125), tables, 96, 111) == ()


def test_windows_of_generated_tokens_are_saved_where_asked_for():
    """By itself vLLM keeps a window at the prompt's last boundary alone."""
    groups = (FULL16, WINDOW16)
    dense = Coordinator(groups, 16, 16)
    sparse = Coordinator(groups, 16, 16, retention_tokens=0)
    tables = [table(8, 10), table(8, 20)]
    asked = request(128, prompt=70)
    prompt = listed(ChunkPlanner(sparse, dense).saves(asked, tables, 0, 64))
    assert prompt == listed(ChunkPlanner(sparse).saves(asked, tables, 0, 64))
    assert prompt[1] == [(22, 2), (23, 3)]
    generated = listed(ChunkPlanner(sparse, dense).saves(asked, tables, 64, 128))
    assert generated[1] == [(24, 4), (25, 5), (26, 6), (27, 7)]
    assert 1 not in listed(ChunkPlanner(sparse).saves(asked, tables, 64, 128))


def blocks_of(table):
    return [SimpleNamespace(block_id=block) for block in table]


@pytest.mark.parametrize("retention", [None, 0], ids="retention={}".format)
@pytest.mark.parametrize(
    "groups",
    [(FULL16,), (FULL64, OTHER16), (SCRATCH, FULL64), (FULL16, WINDOW64), (FULL64, EAGLE64)],
    ids=["full", "two_sizes", "scratch", "window", "eagle"],
)
def test_common_blocks_beyond_the_prompt_are_what_saves_takes(groups, retention):
    dense = Coordinator(groups, 16, 64)
    plan = ChunkPlanner(Coordinator(groups, 16, 64, retention_tokens=retention), dense)
    assert plan.saves_every_generated_block
    asked = request(512, prompt=100)
    tables = [table(512 // size.block_tokens, 100 * at) for at, size in enumerate(groups, 1)]
    for end in range(128, 513, 64):
        found = plan.common_blocks([(asked.block_hashes, [*map(blocks_of, tables)], end)])
        assert listed(found) == listed(plan.saves(asked, tables, end - 64, end))
        assert sum(map(len, found)) == plan.blocks_per_common_block


def test_common_blocks_of_several_requests_leave_out_what_is_not_there():
    plan = planner(FULL16, WINDOW16)
    one, other = request(64), request(160)
    found = plan.common_blocks(
        [
            (one.block_hashes, [blocks_of([1, 2, 3]), blocks_of([0, 5, 6])], 16),
            (one.block_hashes, [blocks_of([1, 2, 3]), blocks_of([0, 5, 6])], 64),
            (other.block_hashes, [blocks_of(table(10, 20)), blocks_of(table(10, 40))], 160),
        ]
    )
    assert listed(found) == {0: [(1, 0), (29, 9)], 1: [(49, 9)]}


@pytest.mark.parametrize(
    ("groups", "retention"),
    [((FULL64, WINDOW16), None), ((FULL64, CHUNKED), None), ((FULL64, MAMBA64), None)]
    + [((FULL64, WINDOW64), retention) for retention in (0, 128)],
    ids=["between_boundaries", "chunked", "states", "retention=0", "retention=128"],
)
def test_groups_of_which_blocks_may_be_left_out_are_planned_by_masks(groups, retention):
    plan = ChunkPlanner(Coordinator(groups, 16, 64, retention_tokens=retention))
    assert not plan.saves_every_generated_block
