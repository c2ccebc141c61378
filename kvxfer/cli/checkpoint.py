# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of small Llama models whose outputs depend on their KV cache.

vLLM's dummy weights are within 1e-3 of zero: outputs are then the same whatever the cache holds,
and a test of the cache proves nothing. Weights here have the size of trained ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WEIGHT_GAIN = 1.2
"""Matrices are normal with WEIGHT_GAIN / sqrt(fan_in): activations keep their size."""
NORM_RANGE = (0.5, 1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama model; the defaults take some milliseconds per prompt, for tests."""

    vocab_size: int = 512
    hidden_size: int = 128
    mlp_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    max_tokens: int = 4096

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of keys and values of one token in float32, all layers."""
        return 2 * 4 * self.num_layers * self.num_kv_heads * self.head_size


DEMO_SHAPE = LlamaShape(
    vocab_size=2048,
    hidden_size=768,
    mlp_size=2048,
    num_layers=8,
    num_heads=12,
    num_kv_heads=4,
    head_size=64,
    max_tokens=32768,
)
"""About 205 MB on disk, 16 KiB of cache per token; 1,500 tokens take 1.5 to 3 s on two cores."""


def write_llama(folder: Path, shape: LlamaShape, seed: int = 0) -> None:
    """Write ``config.json`` and ``model.safetensors`` (float32) into ``folder``, made if missing.

    The same shape and seed give the same weights. Needs ``safetensors``, which vLLM brings.
    """
    from safetensors.numpy import save_file  # noqa: PLC0415 (only where a model is made)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1))
    weights = dict(_weights(shape, np.random.default_rng(seed)))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _config(shape: LlamaShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.max_tokens,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _weights(
    shape: LlamaShape, random: np.random.Generator
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield every tensor of the checkpoint under its Hugging Face name."""
    hidden, mlp = shape.hidden_size, shape.mlp_size
    query, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    layer_matrices = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    # A row of the embedding is picked, not summed: its fan-in is 1.
    yield "model.embed_tokens.weight", _matrix(random, shape.vocab_size, hidden, fan_in=1)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in layer_matrices.items():
            yield f"{prefix}.{name}.weight", _matrix(random, rows, columns, fan_in=columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", _norm(random, hidden)
    yield "model.norm.weight", _norm(random, hidden)
    yield "lm_head.weight", _matrix(random, shape.vocab_size, hidden, fan_in=hidden)


def _matrix(
    random: np.random.Generator, rows: int, columns: int, fan_in: int
) -> NDArray[np.float32]:
    matrix = random.standard_normal((rows, columns), dtype=np.float32)
    matrix *= np.float32(WEIGHT_GAIN / fan_in**0.5)
    return matrix


def _norm(random: np.random.Generator, size: int) -> NDArray[np.float32]:
    return random.uniform(*NORM_RANGE, size).astype(np.float32)
