# SPDX-License-Identifier: Apache-2.0
"""The in-tree connector's lookup on a store of ours: its worker's own code, nothing else of it."""

import threading
from types import SimpleNamespace

import pytest


def upstream_worker(windows, block_tokens, num_shards, store):
    """Return a worker that can ``lookup`` and nothing else, and its groups' key prefixes.

    One full-attention group, then a sliding-window group for each of ``windows``.
    """
    pytest.importorskip("vllm")
    package = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store"
    worker_module = pytest.importorskip(f"{package}.worker")
    data = pytest.importorskip(f"{package}.data")
    coordinator_module = pytest.importorskip(f"{package}.coordinator")

    groups = kv_cache_groups(windows, block_tokens)
    worker = object.__new__(worker_module.MooncakeStoreWorker)
    worker._capacity_only = False
    worker.hash_block_size = block_tokens
    worker.coord = coordinator_module.MooncakeStoreCoordinator(groups, block_tokens, block_tokens)
    worker._kv_cache_groups = worker.coord.kv_cache_groups
    worker.dcp_size, worker.pcp_size, worker.pp_size = 1, 1, 1
    worker.tp_size = worker.num_kv_head = num_shards
    worker.tp_rank, worker.store_tp_size = 0, None
    worker._group_tp_replication_factors = worker._compute_group_tp_replication_factors()
    worker.token_dbs = worker._build_token_databases(data.KeyMetadata("model", 0, 0, 0, 0), None)
    worker._init_lookup_key_prefixes()
    worker._kv_connector_stats_lock = threading.Lock()
    worker.kv_connector_stats = SimpleNamespace(record_operation=lambda **_: None)
    worker.store = store
    return worker


def upstream_keys(worker, hashes):
    """Return every key that the worker's engine would have stored of a prompt."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import PoolKey

    return {
        PoolKey.build_key_string(prefix, block_hash.hex())
        for prefixes in worker._lookup_key_prefixes
        for prefix in prefixes
        for block_hash in hashes
    }


def kv_cache_groups(windows, block_tokens):
    """Return vLLM's groups: one of full attention, one for each sliding window."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

    sizes = {
        "block_size": block_tokens,
        "num_kv_heads": 1,
        "head_size": 128,
        "dtype": torch.bfloat16,
    }
    specs = [FullAttentionSpec(**sizes)]
    specs += [SlidingWindowSpec(**sizes, sliding_window=window) for window in windows]
    return [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
