# SPDX-License-Identifier: Apache-2.0
"""Running requests over vLLM's own cache manager, and the scheduler side that follows them."""

import torch
from config import IS_SMOKE
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvxfer.config import KVXferConfig
from kvxfer.hits import CacheGroup
from kvxfer.lookup import LookupReply
from kvxfer.lookup.protocol import Status
from kvxfer.messages import KVXferWorkerMetadata
from kvxfer.observe.events import SaveEvents
from kvxfer.scheduler import KVXferScheduler
from kvxfer.vllm_specs import EngineFacts

NUM_REQUESTS = 4 if IS_SMOKE else 64
BLOCK = 16
PROMPT = 20 * BLOCK if IS_SMOKE else 128 * BLOCK
ROUNDS = 2 if IS_SMOKE else 100
NUM_BLOCKS = NUM_REQUESTS * (PROMPT // BLOCK + ROUNDS + 8)


class Missing:
    """A lookup channel that answers every question at once, with a miss."""

    def lookup(self, key, num_tokens, block_hashes, *, blocking=False):
        return LookupReply(Status.OK, 0)

    def discard(self, key):
        pass


class Running:
    """64 requests in their decode phase, and the scheduler side that follows them.

    ``tells``: it makes KV events of what is stored.
    """

    def __init__(self, tells=False):
        self.manager = make_manager()
        facts = EngineFacts(
            engine_id="engine",
            role="kv_both",
            rank=0,
            pp_rank=0,
            pp_size=1,
            dp_rank=0,
            num_ranks=1,
            max_steps_in_flight=1,
            num_blocks=NUM_BLOCKS,
            block_tokens=BLOCK,
            hash_tokens=BLOCK,
            partial_hits=False,
            use_eagle=False,
            retention_tokens=None,
            groups=(CacheGroup("full", BLOCK),),
            layer_sets=(),
        )
        config = KVXferConfig.from_extra({"save_decode_cache": True}, {})
        events = SaveEvents([BLOCK], hash_tokens=BLOCK, num_ranks=1, store="lmdb://")
        self.side = KVXferScheduler(config, facts, Missing(), events=events if tells else None)
        self.side.bind_kv_cache_manager(self.manager)
        self.requests = make_requests()
        for request in self.requests:
            self.side.get_num_new_matched_tokens(request, 0)
            blocks = self.manager.allocate_slots(request, request.num_tokens)
            self.side.update_state_after_alloc(request, blocks, 0)
            request.num_computed_tokens = request.num_tokens
        self.packed = KVConnectorOutput()
        for _ in range(8 * NUM_REQUESTS):  # as much a step as may be pinned
            self.note(self.step(self.output(1, PROMPT)))
        assert not self.side.has_pending_push_work()

    def output(self, scheduled, computed):
        """Return a step in which every request computes ``scheduled`` of ``computed`` tokens."""
        names = [request.request_id for request in self.requests]
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData(
            names, set(), [], {}, [None] * len(names), [computed - scheduled] * len(names), []
        )
        output.num_scheduled_tokens = dict.fromkeys(names, scheduled)
        output.total_num_scheduled_tokens = scheduled * len(names)
        output.kv_connector_block_state = KVConnectorBlockState(
            set(names), self.manager.get_block_ids, {}
        )
        return output

    def step(self, output):
        """Run what is measured; return the orders."""
        metadata = self.side.build_connector_meta(output)
        self.side.update_connector_output(self.packed)
        self.told = self.side.take_events()
        return metadata

    def note(self, metadata):
        """Let the next step hear that these orders have been packed, and have ended."""
        jobs = {save.job_id: 1 for save in metadata.saves}
        self.told = []  # by now vLLM's publisher has sent and freed them
        meta = KVXferWorkerMetadata(jobs, dict(jobs))
        self.packed = KVConnectorOutput(kv_connector_worker_meta=meta)

    def grow(self, num_tokens):
        """Generate tokens that the next step computes."""
        for request in self.requests:
            request.append_output_token_ids([7] * num_tokens)
            assert self.manager.allocate_slots(request, num_tokens) is not None
            request.num_computed_tokens += num_tokens


def make_manager():
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(
        kv_cache_config=cache,
        max_model_len=1 << 20,
        max_in_flight_tokens=1 << 20,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
    )


def make_requests():
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    return [
        Request(
            f"cmpl-{idx:032d}-0",
            [idx, *range(PROMPT - 1)],
            SamplingParams(max_tokens=1 << 16),
            None,
            block_hasher=hasher,
        )
        for idx in range(NUM_REQUESTS)
    ]
