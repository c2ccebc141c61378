# SPDX-License-Identifier: Apache-2.0
"""kvxfer without vLLM: an engine of one's own that keeps its KV cache in a store.

    python examples/direct_import.py [STORE_URI]

``Engine`` has a paged cache of NumPy arrays, as an engine would have tensors, and a "model" whose
keys and values depend on all tokens before them. One engine computes a prompt and saves it; a
second one, which shares nothing with it but the store, meets a prompt that begins alike, loads
what is stored and computes the rest. The script ends with an error if a single byte is wrong.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import kvxfer

BLOCK_TOKENS = 16
NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 4, 2, 32
NUM_BLOCKS = 64


def block_hashes(tokens: Sequence[int]) -> list[bytes]:
    """Return one hash a whole block; each covers all tokens up to the block's end."""
    hashes, so_far = [], hashlib.sha256(b"my model, my weights")  # what else bytes depend on
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        so_far.update(np.asarray(tokens[end - BLOCK_TOKENS : end], np.int64).tobytes())
        hashes.append(so_far.digest())
    return hashes


def compute(tokens: Sequence[int], start: int) -> NDArray[np.float32]:
    """Return (layers, len(tokens) - start, heads, 2 * size) of the tokens from ``start`` on."""
    before = np.cumsum(np.asarray(tokens, np.float64))[start:]
    shape = (NUM_LAYERS, len(before), NUM_HEADS, 2 * HEAD_SIZE)
    scale = np.arange(1, np.prod(shape[2:]) + 1).reshape(shape[2:])
    layers = np.arange(1, NUM_LAYERS + 1).reshape(-1, 1, 1, 1)
    return np.sin(before.reshape(1, -1, 1, 1) * scale * layers).astype(np.float32)


class Engine:
    """A paged KV cache and where its blocks are stored."""

    def __init__(self, store: kvxfer.Store) -> None:
        # One array a layer, the block axis first: how BlockLayout.from_tensors takes them.
        shape = (NUM_BLOCKS, BLOCK_TOKENS, NUM_HEADS, 2 * HEAD_SIZE)
        self.caches = [np.zeros(shape, np.float32) for _ in range(NUM_LAYERS)]
        self._layout = kvxfer.BlockLayout.from_tensors(self.caches)
        groups = [kvxfer.CacheGroup("full", BLOCK_TOKENS)]
        self._coordinator = kvxfer.Coordinator(groups, BLOCK_TOKENS, BLOCK_TOKENS)
        self._store = store

    def prefill(self, tokens: Sequence[int], block_ids: Sequence[int]) -> int:
        """Fill the blocks of a prompt and save the new ones; return the tokens that were loaded."""
        hashes = block_hashes(tokens)
        loaded = self._load(tokens, hashes, block_ids)
        self._write(compute(tokens, loaded), loaded, block_ids)
        self._save(hashes, block_ids, first=loaded // BLOCK_TOKENS)
        return loaded

    def _load(
        self, tokens: Sequence[int], hashes: Sequence[bytes], block_ids: Sequence[int]
    ) -> int:
        """Load the longest stored prefix, one token short of the prompt at most."""

        def exists(
            questions: list[tuple[int, NDArray[np.int32]]],
        ) -> list[NDArray[np.uint8]]:
            return [
                np.frombuffer(self._store.exists([_key(hashes[i]) for i in idx]), np.uint8)
                for _, idx in questions
            ]

        answer = self._coordinator.lookup(len(tokens), hashes, exists)
        num_blocks = answer.hit_length // BLOCK_TOKENS
        if num_blocks == 0:
            return 0
        values = np.empty((num_blocks, self._layout.value_bytes), np.uint8)
        outcomes = self._store.get_into(
            [_key(block_hash) for block_hash in hashes[:num_blocks]],
            [row.data for row in values],
        )
        if any(outcome is not kvxfer.Outcome.OK for outcome in outcomes):
            return 0  # gone since it was seen: compute it, nothing is lost
        kvxfer.scatter(self._layout, block_ids[:num_blocks], values)
        return answer.hit_length

    def _save(self, hashes: Sequence[bytes], block_ids: Sequence[int], first: int) -> None:
        """Save the whole blocks from ``first`` on."""
        fresh = hashes[first:]
        values = np.empty((len(fresh), self._layout.value_bytes), np.uint8)
        kvxfer.gather(self._layout, block_ids[first : len(hashes)], values)
        keys = [_key(block_hash) for block_hash in fresh]
        self._store.put_from(keys, [row.data for row in values])

    def _write(self, fresh: NDArray[np.float32], start: int, block_ids: Sequence[int]) -> None:
        for offset in range(fresh.shape[1]):
            block, slot = divmod(start + offset, BLOCK_TOKENS)
            for cache, layer in zip(self.caches, fresh, strict=True):
                cache[block_ids[block], slot] = layer[offset]

    def read(self, num_tokens: int, block_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return what the cache holds of a prompt, as ``compute`` returns it."""
        rows = [cache[block_ids].reshape(-1, NUM_HEADS, 2 * HEAD_SIZE) for cache in self.caches]
        return np.stack(rows)[:, :num_tokens]


def _key(block_hash: bytes) -> bytes:
    return b"example/" + block_hash


def main(uri: str) -> None:
    """Prefill a prompt in one engine and one that begins alike in another."""
    random = np.random.default_rng(0)
    shared = [int(token) for token in random.integers(1, 1000, 200)]
    prompts = [[*shared, 7, 8, 9], [*shared, 1, 2, 3, 4]]
    store = kvxfer.open_store(uri)
    try:
        first, second = Engine(store), Engine(store)
        block_ids = [[int(i) for i in random.permutation(NUM_BLOCKS)[:13]] for _ in prompts]
        print(f"first engine: {first.prefill(prompts[0], block_ids[0])} of 203 tokens loaded")
        print(f"second engine: {second.prefill(prompts[1], block_ids[1])} of 204 tokens loaded")
        found = second.read(len(prompts[1]), block_ids[1])
        np.testing.assert_array_equal(found, compute(prompts[1], 0))
        print("every byte is what computing would have given")
    finally:
        store.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(f"lmdb://{folder}/store?capacity=64MiB")
