# SPDX-License-Identifier: Apache-2.0
import pickle

from kvxfer.transfer.specs import Chunks, SaveSpec, merge_chunks

BLOCKS = {b"aa": 7, b"bb": 3, b"cc": 5}


def listed(chunks):
    return (chunks.group, chunks.block_ids.tolist(), chunks.hashes, chunks.hash_bytes)


def test_chunks_of_a_mapping_keep_its_order():
    chunks = Chunks.of(2, BLOCKS)
    assert listed(chunks) == (2, [7, 3, 5], b"aabbcc", 2)
    assert list(chunks.by_hash().items()) == list(BLOCKS.items())


def test_chunks_of_nothing_are_empty():
    chunks = Chunks.of(0, {})
    assert len(chunks) == 0
    assert chunks.by_hash() == {}


def test_merged_chunks_are_one_a_group_in_the_order_of_the_parts():
    parts = [Chunks.of(0, {b"aa": 1}), Chunks.of(1, {b"aa": 2}), Chunks.of(0, {b"bb": 3})]
    assert [listed(part) for part in merge_chunks(parts)] == [
        (0, [1, 3], b"aabb", 2),
        (1, [2], b"aa", 2),
    ]


def test_merged_chunks_have_each_hash_of_a_group_once():
    (merged,) = merge_chunks([Chunks.of(0, {b"aa": 1, b"bb": 2}), Chunks.of(0, {b"aa": 9})])
    assert set(merged.by_hash()) == {b"aa", b"bb"}
    assert merged.by_hash()[b"aa"] in (1, 9)


def test_merge_of_nothing_is_nothing():
    assert merge_chunks([]) == ()


def test_save_travels_between_processes():
    spec = SaveSpec(4, 1, (Chunks.of(2, BLOCKS),))
    twin = pickle.loads(pickle.dumps(spec))
    assert (twin.job_id, twin.epoch) == (4, 1)
    assert [listed(part) for part in twin.chunks] == [listed(part) for part in spec.chunks]
