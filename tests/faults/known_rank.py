# SPDX-License-Identifier: Apache-2.0
"""One rank's transfers over a cache whose right content is known for every chunk.

A chunk has a number; its hash and its bytes follow from it. Two cache groups: one of two layers
whose heads are two shards, one of one layer with a state.
"""

import hashlib
import threading
import time
from collections import Counter

import numpy as np

from kvxfer.blocks import BlockLayout, Region, StagingPool
from kvxfer.blocks.movers import HostMover
from kvxfer.keys import KeySpace
from kvxfer.transfer import Chunks, JobBoard, Loader, LoadSpec, Route, Saver, SaveSpec

HEADS, TOKENS = 2, 4
UNTOUCHED = 0xA5
WAIT_S = 20.0
HEAD_AXES = ("block", "head", "token", "content")
LAYERS = {0: ("attention.0", "attention.1"), 1: ("state.0",)}
"""Cache group -> its layers."""
PREFIX = b"known/"


def chunk_hash(number):
    """Return the hash that names a chunk."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def chunks(group, blocks, numbers):
    """Return chunks ``numbers`` of a group, in ``blocks``."""
    hashes = b"".join(map(chunk_hash, numbers))
    return Chunks(group, np.array(blocks, np.int32), hashes, 32)


class KnownRank:
    """A rank over ``store``; ``free`` and ``ended`` list every report in its order."""

    def __init__(
        self,
        store,
        *,
        num_blocks=24,
        content=24,
        slot_bytes=1 << 16,
        num_slots=4,
        num_threads=1,
        timeout_s=WAIT_S,
        clock=time.monotonic,
    ):
        self.store = store
        self.caches = {
            group: [self._empty(group, num_blocks, content) for _ in layers]
            for group, layers in LAYERS.items()
        }
        self.layout = self._layout(num_blocks)
        self.board = JobBoard(clock)
        self.staging = StagingPool(num_slots, slot_bytes)
        self.spaces = {group: self._spaces(group) for group in LAYERS}
        route = Route(store, HostMover(self.layout), self.staging, self.spaces)
        options = {"num_threads": num_threads, "max_queued": 64, "timeout_s": timeout_s}
        self.saver = Saver(self.board, route, **options)
        self.loader = Loader(self.board, route, **options)
        self.free, self.ended, self.valid = Counter(), Counter(), {}
        self.results = {}

    # Content

    def known(self, group, number):
        """Return the right content of a chunk: one array per layer of the group."""
        return [
            np.frombuffer(
                hashlib.shake_128(f"{layer}/{number}".encode()).digest(cache[0].nbytes), np.uint8
            ).reshape(cache.shape[1:])
            for layer, cache in zip(LAYERS[group], self.caches[group], strict=True)
        ]

    def fill(self, group, block, number):
        """Write the right content of a chunk into a block, as a forward pass would."""
        for cache, content in zip(self.caches[group], self.known(group, number), strict=True):
            cache[block] = content

    def holds(self, group, block, number):
        """Whether a block has the right content of a chunk, every byte."""
        pairs = zip(self.caches[group], self.known(group, number), strict=True)
        return all(np.array_equal(cache[block], content) for cache, content in pairs)

    def holds_nothing_else(self, group, block, number):
        """Whether each byte of a block is right for the chunk, or untouched."""
        pairs = zip(self.caches[group], self.known(group, number), strict=True)
        return all(
            ((cache[block] == content) | (cache[block] == UNTOUCHED)).all()
            for cache, content in pairs
        )

    def is_untouched(self, group, block):
        """Whether nothing was ever written into a block."""
        return all((cache[block] == UNTOUCHED).all() for cache in self.caches[group])

    def snapshot(self):
        """Return a copy of every byte of the cache."""
        return [cache.copy() for caches in self.caches.values() for cache in caches]

    def equals(self, snapshot):
        """Whether every byte of the cache is as it was."""
        caches = [cache for caches in self.caches.values() for cache in caches]
        return all(np.array_equal(*pair) for pair in zip(caches, snapshot, strict=True))

    def keys(self, group, number):
        """Return the keys of all values of a chunk."""
        every = np.zeros(1, np.int32)
        return [space.keys(chunk_hash(number), 32, every)[0] for space in self.spaces[group]]

    # Jobs

    def save(self, job_id, parts):
        """Order a save of ``{group: (blocks, numbers)}``, whose content the blocks get first."""
        for group, (blocks, numbers) in parts.items():
            for block, number in zip(blocks, numbers, strict=True):
                self.fill(group, block, number)
        self.saver.submit(SaveSpec(job_id, 0, _ordered(parts)))

    def finish_work(self):
        """Wait for what the threads do beyond the end of their jobs."""
        for transfer in (self.saver, self.loader):
            assert transfer._threads.wait_idle(20), "a thread is still busy"

    def load(self, job_id, parts):
        """Order a load of ``{group: (blocks, numbers)}``."""
        num_tokens = TOKENS * max(len(blocks) for blocks, _ in parts.values())
        self.loader.submit(LoadSpec(job_id, f"r{job_id}", 0, num_tokens, _ordered(parts)))

    def poll(self):
        """Take reports as the worker does at the end of a step."""
        reports = self.board.take_reports()
        self.free.update(reports.blocks_free)
        self.ended.update(reports.ended.keys())
        self.results.update(reports.ended)
        for job_id in reports.ended:
            self.valid[job_id] = self.loader.take_valid_chunks(job_id)

    def wait(self, condition):
        """Poll until a condition holds; fails after ``WAIT_S``."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"nothing happened in {WAIT_S} s"
            threading.Event().wait(0.001)
            self.poll()

    def result(self, job_id):
        """Wait for a job's end and return its result."""
        self.wait(lambda: job_id in self.results)
        return self.results[job_id]

    def close(self):
        """Close threads and staging; the store is the caller's."""
        self.saver.close(5)
        self.loader.close(5)
        self.staging.close()
        self.poll()

    # Construction

    @staticmethod
    def _empty(group, num_blocks, content):
        shape = (num_blocks, HEADS, TOKENS, content) if group == 0 else (num_blocks, 5 * content)
        return np.full(shape, UNTOUCHED, dtype=np.uint8)

    def _layout(self, num_blocks):
        regions = [
            Region(
                tensor=cache,
                group=group,
                layer=layer,
                axes=HEAD_AXES if group == 0 else ("block", "content"),
                heads=(0, HEADS) if group == 0 else None,
            )
            for group, layers in LAYERS.items()
            for layer, cache in zip(layers, self.caches[group], strict=True)
        ]
        return BlockLayout.from_regions(
            regions, value_order="native", head_shard={0: 1, 1: None}, num_blocks=num_blocks
        )

    def _spaces(self, group):
        return [
            KeySpace(group, PREFIX + f"{group}/{c.heads}/".encode(), class_id, c.value_bytes)
            for class_id, c in enumerate(self.layout.classes)
            if c.group == group
        ]


def _ordered(parts):
    return tuple(chunks(group, blocks, numbers) for group, (blocks, numbers) in parts.items())
