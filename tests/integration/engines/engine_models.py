# SPDX-License-Identifier: Apache-2.0
"""The tiny model of the engine tests, its drafter, and prompts for it."""

import json

import numpy as np

from kvxfer.cli.checkpoint import LlamaShape, write_llama

TINY = LlamaShape()
BLOCK_TOKENS = 32


def write_tiny_llama(folder):
    """Write the checkpoint, 3 MB, whose outputs depend on the KV cache; return its folder."""
    write_llama(folder, TINY)
    return folder


def write_tiny_drafter(folder, target):
    """Write an EAGLE drafter for the tiny model: its first layer, and a matrix before it."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((target / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    weights = {
        name.removeprefix("model."): tensor.clone()
        for name, tensor in load_file(target / "model.safetensors").items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    random = torch.Generator().manual_seed(3)
    hidden = TINY.hidden_size
    weights["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=random) / hidden**0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
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
