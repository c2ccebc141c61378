# SPDX-License-Identifier: Apache-2.0
"""``transfer=direct`` on a real pool: values moved in place and packed ones are the same."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "transfer"))

from test_direct import NUM_BLOCKS, UNTOUCHED, Rank, chunks, layers_apart

from kvxfer.stores.parts import TransferMode
from kvxfer.transfer import JobResult, LoadSpec, SaveSpec

WAYS = ("packed", "direct")


@pytest.fixture
def make_rank(start, open_on):
    """Return a function that makes a rank whose values go one way or the other."""
    pool, ranks = start(), []

    def make(transfer, caches):
        store = open_on(pool, transfer=transfer)
        assert store.transfer_mode is TransferMode(transfer)
        ranks.append(Rank(store, caches, in_place=transfer == "direct", heads_per_shard=2))
        if transfer == "packed":
            store.register(ranks[-1].staging.buffer)
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.saver.close(5)
        rank.loader.close(5)


@pytest.mark.parametrize("writing", WAYS)
@pytest.mark.parametrize("reading", WAYS)
def test_each_way_reads_what_the_other_has_written(make_rank, writing, reading):
    writer = make_rank(writing, layers_apart(np.random.default_rng(1)))
    writer.saver.submit(SaveSpec(0, 0, chunks([1, 2, 3])))
    assert writer.finish() == {0: JobResult.DONE}
    reader = make_rank(reading, [np.full_like(cache, UNTOUCHED) for cache in writer.caches])
    reader.loader.submit(LoadSpec(1, "request", 0, 3, chunks([7, 5, 9])))
    assert reader.finish() == {1: JobResult.DONE}
    for ours, theirs in zip(reader.caches, writer.caches, strict=True):
        assert np.array_equal(ours[[7, 5, 9]], theirs[[1, 2, 3]])
        others = [block for block in range(NUM_BLOCKS) if block not in (7, 5, 9)]
        assert (ours[others] == UNTOUCHED).all()
