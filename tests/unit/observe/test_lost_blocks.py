# SPDX-License-Identifier: Apache-2.0
import pytest

from kvxfer.keys import KeySpace, index_array, key_prefix
from kvxfer.observe.lost_blocks import LostBlocks

HASHES = [bytes([i]) * 32 for i in range(4)]


def space(group, heads=(0, 2), stage=0, name="full", model="model"):
    return KeySpace(group, key_prefix("default", model, "digest", name, stage, heads))


def keys(space, *idx):
    return space.keys(b"".join(HASHES), 32, index_array(idx))


@pytest.fixture
def lost():
    blocks = LostBlocks()
    blocks.know([[space(0)], [space(1, name="window")]])
    return blocks


def test_keys_become_blocks_of_their_groups(lost):
    lost.note([*keys(space(0), 1), *keys(space(1, name="window"), 2)])
    assert lost.take() == {(0, HASHES[1]), (1, HASHES[2])}
    assert lost.take() == frozenset()


@pytest.mark.parametrize("other", [{"heads": (2, 4)}, {"heads": None}, {"stage": 1}])
def test_shards_and_stages_of_other_ranks_are_the_same_block(lost, other):
    lost.note([*keys(space(0), 1), *keys(space(0, **other), 1)])
    assert lost.take() == {(0, HASHES[1])}


@pytest.mark.parametrize("other", [{"model": "other"}, {"name": "other"}])
def test_keys_of_others_are_passed_over(lost, other):
    lost.note(keys(space(0, **other), 1))
    assert lost.take() == frozenset()


@pytest.mark.parametrize("key", [b"", b"/", b"a/b", b"kvx1/default/model/digest/full/p0/h0-2/zz"])
def test_keys_that_are_none_of_ours_are_passed_over(lost, key):
    lost.note([key])
    assert lost.take() == frozenset()


def test_digest_beside_a_value_is_passed_over(lost):
    lost.note([key + b"#" for key in keys(space(0), 1)])
    assert lost.take() == frozenset()


def test_blocks_beyond_the_bound_are_not_told():
    blocks = LostBlocks(max_blocks=2)
    blocks.know([[space(0)]])
    blocks.note(keys(space(0), 0, 1))
    blocks.note(keys(space(0), 2))
    assert blocks.take() == {(0, HASHES[0]), (0, HASHES[1])}
    blocks.note(keys(space(0), 2))
    assert blocks.take() == {(0, HASHES[2])}


def test_spaces_learnt_later_are_known_besides(lost):
    lost.know([[space(2, name="state")]])
    lost.note([*keys(space(2, name="state"), 0), *keys(space(0), 0)])
    assert lost.take() == {(0, HASHES[0]), (2, HASHES[0])}


def test_reports_of_ranks_are_taken_together():
    pytest.importorskip("vllm")
    from kvxfer.messages import KVXferWorkerMetadata

    ranks = [
        KVXferWorkerMetadata(ended={1: 1}, failed_saves=frozenset({rank}), lost=frozenset({at}))
        for rank, at in enumerate([(0, b"a"), (1, b"a")])
    ]
    both = ranks[0].aggregate(ranks[1])
    assert (both.ended, both.failed_saves) == ({1: 2}, {0, 1})
    assert both.lost == {(0, b"a"), (1, b"a")}
