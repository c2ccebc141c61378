# SPDX-License-Identifier: Apache-2.0
"""The two sides of the lookup benchmarks on one store: ours, and the in-tree connector's own code.

Both build their own keys and ask the same kind of store in this process. ``store=stub`` knows its
answer without looking, so what is left is each side's own work; ``store=0.4us`` spends 0.4 us of
CPU on every key besides, as an embedded store does; ``store=set`` looks each key up in a set.
"""

import hashlib
import time

import numpy as np
from config import SIZES
from hits_rival import upstream_keys, upstream_worker

from kvxfer.hits import CacheGroup, Coordinator
from kvxfer.keys import KeySpace, shard_keys
from kvxfer.lookup import PackedHashes
from kvxfer.lookup.presence import StorePresence

BLOCK_TOKENS = SIZES.block_tokens
WINDOW_TOKENS = min(1024, SIZES.prompt_tokens // 8)
CASES = {  # sliding-window groups beside full attention, and whether all is stored
    "cold": (0, False),
    "full_hit": (0, True),
    "hybrid_cold": (5, False),
    "hybrid_full_hit": (5, True),
}
STORES = ("stub", "0.4us", "set")
KEY_COST_S = 0.4e-6


class CountingStore:
    """A store behind both sides' interfaces that counts what it is asked."""

    def __init__(self):
        self.num_keys = self.num_calls = 0

    def exists(self, keys):
        return bytearray(self.batch_is_exist(keys))

    def count(self, keys):
        self.num_keys += len(keys)
        self.num_calls += 1


class SetStore(CountingStore):
    """A set of keys."""

    def __init__(self, keys):
        super().__init__()
        self.keys = keys

    def batch_is_exist(self, keys):
        self.count(keys)
        stored = self.keys
        return [1 if key in stored else 0 for key in keys]


class StubStore(CountingStore):
    """Says the same of every key, after ``key_cost_s`` for each."""

    def __init__(self, is_stored, key_cost_s):
        super().__init__()
        self.answer, self.key_cost_s = int(is_stored), key_cost_s

    def exists(self, keys):
        self._spend(keys)
        return bytearray([self.answer]) * len(keys)

    def batch_is_exist(self, keys):
        self._spend(keys)
        return [self.answer] * len(keys)

    def _spend(self, keys):
        self.count(keys)
        end = time.thread_time() + len(keys) * self.key_cost_s
        while self.key_cost_s and time.thread_time() < end:
            pass


class KvxferLookup:
    """Our lookup as the lookup server runs it."""

    def __init__(self, num_windows):
        window = {"window_tokens": WINDOW_TOKENS, "spec_id": "window"}
        groups = [CacheGroup("full", BLOCK_TOKENS, spec_id="full")]
        groups += [CacheGroup("sliding_window", BLOCK_TOKENS, **window)] * num_windows
        self.coordinator = Coordinator(groups, BLOCK_TOKENS, BLOCK_TOKENS)
        self.spaces = {
            group: [
                KeySpace(group, b"kvx1/default/model/%032d/%016d/p0/h%d/" % (0, group, shard))
                for shard in range(SIZES.num_shards)
            ]
            for group in range(len(groups))
        }
        self.store = None

    def pack(self, hashes):
        """Return the hashes as the server gets them."""
        return PackedHashes.pack(hashes)

    def keys(self, hashes):
        every = np.arange(len(hashes), dtype=np.int32)
        spaces = [space for group in self.spaces.values() for space in group]
        return set(shard_keys(spaces, b"".join(hashes), SIZES.hash_bytes, every))

    def look_up(self, num_tokens, hashes):
        presence = StorePresence(self.store, self.spaces, hashes)
        return self.coordinator.lookup(num_tokens, hashes, presence.exists)


class UpstreamLookup:
    """The in-tree connector's lookup as its server runs it."""

    def __init__(self, num_windows):
        windows = [WINDOW_TOKENS] * num_windows
        self.worker = upstream_worker(windows, BLOCK_TOKENS, SIZES.num_shards, None)

    @property
    def store(self):
        return self.worker.store

    @store.setter
    def store(self, store):
        self.worker.store = store

    def pack(self, hashes):
        """Return the hashes as they are: a list is quicker here than the server's view of them."""
        return hashes

    def keys(self, hashes):
        return upstream_keys(self.worker, hashes)

    def look_up(self, num_tokens, hashes):
        return self.worker.lookup(num_tokens, hashes)


LOOKUPS = {"kvxfer": KvxferLookup, "upstream": UpstreamLookup}
IMPLS = tuple(LOOKUPS)


class PromptLookup:
    """One side's lookup of one prompt."""

    def __init__(self, side, hashes, num_tokens):
        self.side, self.num_tokens = side, num_tokens
        self.hashes = side.pack(hashes)

    def answer(self):
        return self.side.look_up(self.num_tokens, self.hashes)

    def hit_length(self):
        return self.answer().hit_length

    def asked(self):
        """Return how many keys and store calls one lookup takes."""
        store = self.side.store
        store.num_keys = store.num_calls = 0
        self.answer()
        return store.num_keys, store.num_calls


def side_of(impl, case):
    """Return a side, whose stub store answers as the case says."""
    num_windows, is_stored = CASES[case]
    side = LOOKUPS[impl](num_windows)
    side.store = StubStore(is_stored, 0.0)
    return side


def lookup_on(impl, num_tokens, case, store="stub"):
    """Return a side's lookup of a prompt, with its store filled as the case says."""
    hashes, side = hashes_of(num_tokens), side_of(impl, case)
    if store == "0.4us":
        side.store.key_cost_s = KEY_COST_S
    if store == "set":
        side.store = SetStore(side.keys(hashes if CASES[case][1] else []))
    return PromptLookup(side, hashes, num_tokens)


def lookup_of_share(impl, num_tokens, share):
    """Return a side's lookup of a prompt of which the first ``share`` lies in a set."""
    hashes = hashes_of(num_tokens)
    side = LOOKUPS[impl](0)
    side.store = SetStore(side.keys(hashes[: int(len(hashes) * share)]))
    return PromptLookup(side, hashes, num_tokens)


def expected_hit(num_tokens, case):
    return num_tokens - BLOCK_TOKENS if CASES[case][1] else 0


def hashes_of(num_tokens):
    """Return the block hashes of a prompt, as vLLM keeps them: a list of bytes."""
    num_hashes = num_tokens // BLOCK_TOKENS
    return [hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(num_hashes)]
