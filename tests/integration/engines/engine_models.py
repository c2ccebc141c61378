# SPDX-License-Identifier: Apache-2.0
"""The tiny model of the engine tests, and prompts for it."""

import numpy as np

from kvxfer.cli.checkpoint import LlamaShape, write_llama

TINY = LlamaShape()
BLOCK_TOKENS = 32


def write_tiny_llama(folder):
    """Write the checkpoint, 3 MB, whose outputs depend on the KV cache; return its folder."""
    write_llama(folder, TINY)
    return folder


class Prompts:
    """Random prompts without a period; another ``seed`` shares no prefix with this one."""

    def __init__(self, seed):
        self._random = np.random.default_rng(seed)

    def draw(self, num_tokens):
        """Return the token ids of a new prompt."""
        return [int(token) for token in self._random.integers(3, TINY.vocab_size, num_tokens)]


def loadable(num_tokens):
    """Return how many tokens of a stored prompt are loaded: whole blocks, never all tokens."""
    return (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
