# SPDX-License-Identifier: Apache-2.0
"""Keys, and keys with the copy plan, of one load of a whole prompt into an 80-layer cache.

The rival builds keys with its own classes and one address list per chunk with an entry per layer,
as its load thread does for every request.
"""

import hashlib

import numpy as np
import pytest
from config import SIZES

from kvxfer.keys import KeySpace
from kvxfer.transfer import Chunks
from kvxfer.transfer.pieces import Pieces

SLOT_BYTES = 64 << 20
PAGE_BYTES = 16 << 10
LAYER_BYTES = PAGE_BYTES * (SIZES.num_hashes + 1)
VALUE_BYTES = PAGE_BYTES * SIZES.num_layers
PREFIX = b"kvx1/default/model/0123456789abcdef0123456789abcdef/0123456789abcdef/p0/h0-8/"


@pytest.fixture(scope="module")
def hashes():
    return [hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(SIZES.num_hashes)]


@pytest.fixture(scope="module")
def block_ids():
    return np.random.default_rng(0).permutation(SIZES.num_hashes).astype(np.int32) + 1


def kvxfer_keys(hashes, block_ids):
    packed = b"".join(hashes)
    every = np.arange(len(hashes), dtype=np.int32)
    return lambda: KeySpace(0, PREFIX).keys(packed, 32, every)


def kvxfer_plan(hashes, block_ids):
    spaces = {0: [KeySpace(0, PREFIX, 0, VALUE_BYTES)]}
    packed = b"".join(hashes)

    def plan():
        pieces = Pieces.of([Chunks(0, block_ids, packed, 32)], spaces)
        return pieces.keys, [pieces.items(batch, 1 << 40) for batch in pieces.batches(SLOT_BYTES)]

    return plan


def upstream_database():
    pytest.importorskip("vllm")
    data = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data")
    metadata = data.KeyMetadata("model", 0, 0, 0, 0)
    database = data.ChunkedTokenDatabase(metadata, SIZES.block_tokens)
    database.set_kv_caches_base_addr([i * LAYER_BYTES for i in range(SIZES.num_layers)])
    database.set_block_len([PAGE_BYTES] * SIZES.num_layers)
    return database


def upstream_keys(hashes, block_ids):
    database = upstream_database()
    tokens = SIZES.prompt_tokens
    return lambda: [database.key_for(h) for _, _, h in database.process_tokens(tokens, hashes)]


def upstream_plan(hashes, block_ids):
    database, blocks = upstream_database(), block_ids.tolist()

    def plan():
        chunks, keys = [], []
        for start, end, block_hash in database.process_tokens(SIZES.prompt_tokens, hashes):
            chunks.append((start, end))
            keys.append(database.key_for(block_hash))
        return keys, database.store_layout.prepare_values(chunks, blocks, [0] * len(chunks))

    return plan


KEYS = {"kvxfer": kvxfer_keys, "upstream": upstream_keys}
PLANS = {"kvxfer": kvxfer_plan, "upstream": upstream_plan}


@pytest.mark.benchmark(group="keys.build")
@pytest.mark.parametrize("impl", KEYS, ids="impl={}".format)
def bench_build_keys(benchmark, impl, hashes, block_ids):
    keys = benchmark(KEYS[impl](hashes, block_ids))
    assert len(keys) == len(set(keys)) == SIZES.num_hashes
    last = keys[-1] if isinstance(keys[-1], str) else keys[-1].decode()
    assert last.endswith(hashes[-1].hex())


@pytest.mark.benchmark(group="transfer.plan")
@pytest.mark.parametrize("impl", PLANS, ids="impl={}".format)
def bench_plan_load(benchmark, impl, hashes, block_ids):
    keys, plan = benchmark(PLANS[impl](hashes, block_ids))
    assert len(keys) == SIZES.num_hashes
    if impl == "kvxfer":
        planned = np.concatenate([items["block_id"] for items in plan])
    else:
        addresses, _, planned = plan
        assert len(addresses[0]) == SIZES.num_layers
    np.testing.assert_array_equal(planned, block_ids)
