# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the parts of vLLM's scheduler that the scheduler side talks to."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from kvxfer.config import KVXferConfig
from kvxfer.hits import CacheGroup
from kvxfer.lookup import LookupReply
from kvxfer.lookup.protocol import Status
from kvxfer.vllm_specs import EngineFacts


def make_facts(*, block_tokens=16, role="kv_both", num_ranks=1, num_blocks=256) -> EngineFacts:
    return EngineFacts(
        engine_id="engine",
        role=role,
        rank=0,
        pp_rank=0,
        pp_size=1,
        dp_rank=0,
        num_ranks=num_ranks,
        max_steps_in_flight=1,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        hash_tokens=block_tokens,
        partial_hits=False,
        use_eagle=False,
        retention_tokens=None,
        groups=(CacheGroup("full", block_tokens),),
        layer_sets=(),
    )


def make_config(**settings) -> KVXferConfig:
    return KVXferConfig.from_extra(settings, {})


@dataclass(eq=False)
class FakeRequest:
    """A request with distinct hashes; ``num_tokens`` may grow."""

    request_id: str
    num_tokens: int
    block_tokens: int = 16
    num_prompt_tokens: int = 0
    skip_reading_prefix_cache: bool = False

    def __post_init__(self):
        self.num_prompt_tokens = self.num_prompt_tokens or self.num_tokens

    @property
    def block_hashes(self):
        num = self.num_tokens // self.block_tokens
        return [f"{self.request_id}-{i}".encode().ljust(32, b".") for i in range(num)]


@dataclass
class FakeLookups:
    """Answers from a script: request id -> list of replies, None meaning in flight."""

    script: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)
    discarded: list = field(default_factory=list)
    blocking: list = field(default_factory=list)
    told: list = field(default_factory=list)

    def answer(self, request_id, *hits):
        self.script[request_id] = [
            None if hit is None else LookupReply(Status.OK, hit) for hit in hits
        ]

    def lookup(self, key, num_tokens, block_hashes, *, blocking=False):
        self.asked.append((key, num_tokens))
        self.blocking.append(blocking)
        replies = self.script.get(key, [])
        return replies.pop(0) if replies else LookupReply(Status.OK, 0)

    def discard(self, key):
        self.discarded.append(key)

    def send_key_spaces(self, payload, timeout_s):
        self.told.append(payload)
        return True

    def ping(self, timeout_s):
        return True

    def close(self):
        pass


class FakePool:
    """Counts references like vLLM's block pool."""

    def __init__(self, num_blocks=256):
        self.blocks = list(range(num_blocks))
        self.references = dict.fromkeys(self.blocks, 0)

    def touch(self, blocks):
        for block in blocks:
            self.references[block] += 1

    def free_blocks(self, ordered_blocks):
        for block in ordered_blocks:
            self.references[block] -= 1
            assert self.references[block] >= 0

    @property
    def pinned(self):
        return {block for block, count in self.references.items() if count}


class FakeManager:
    """vLLM's cache manager: a pool, and ``tables``: request id -> block ids of each group."""

    def __init__(self, pool, tables):
        self.block_pool, self.tables = pool, tables

    def get_blocks(self, name):
        groups = self.tables.get(name, ([],))
        return SimpleNamespace(
            blocks=tuple([SimpleNamespace(block_id=block) for block in ids] for ids in groups)
        )


def allocated(*block_ids):
    """Return what ``KVCacheBlocks`` offers for one group."""
    return SimpleNamespace(get_block_ids=lambda: (list(block_ids),))


def step(new=(), cached=(), tables=None, handed=None):
    """Return a SchedulerOutput: ``new`` and ``cached`` are (id, computed, scheduled) triples."""
    tables = tables or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed) for name, computed, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in cached],
            num_computed_tokens=[computed for _, computed, _ in cached],
        ),
        num_scheduled_tokens={name: count for name, _, count in (*new, *cached)},
        finished_req_ids=set(),
        preempted_req_ids=None,
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda name: (tables[name],) if name in tables else None,
            boundary_state_offloads=handed or {},
        ),
    )


def blocks_by_request(saves):
    """Return {request id: its blocks in the order of the jobs}, told by the hashes of requests."""
    found = {}
    for save in saves:
        for part in save.chunks:
            for block_hash, block in part.by_hash().items():
                found.setdefault(block_hash.partition(b"-")[0].decode(), []).append(block)
    return found


def worker_output(meta=None, finished_recving=None):
    return SimpleNamespace(kv_connector_worker_meta=meta, finished_recving=finished_recving)
