# SPDX-License-Identifier: Apache-2.0
"""The connector of the tests, in engines whose CPU operator turns each head by its position.

vLLM 0.32's operator goes from token to token by the stride of the second-last dimension. In the
queries of latent attention, ``[tokens, heads, content]``, that leads to the next head: a few heads
are turned by the positions of others, the rest by none. Which ones depends on the heads of a rank,
so that engines of other tensor-parallel sizes would compute other functions. Here the operator
gets one row for each token, which it turns as it should.
"""

import torch
import vllm._custom_ops

_rotate = vllm._custom_ops.rotary_embedding


def rotary_embedding(positions, query, key, *rest):
    """Turn queries and keys in place, whatever their strides and the number of dimensions."""
    flat = [one if one is None else _rows(one, positions.numel()) for one in (query, key)]
    _rotate(positions, *flat, *rest)
    for one, turned in zip((query, key), flat, strict=True):
        if one is not None:
            one.copy_(turned.view(one.shape))


def _rows(tensor, num_tokens):
    """Return a dense copy with one row for each token."""
    return tensor.reshape(num_tokens, -1).clone(memory_format=torch.contiguous_format)


vllm._custom_ops.rotary_embedding = rotary_embedding

# After the operator is replaced: every process of an engine imports this module before a forward.
from tampered_connector import KVXferConnector

__all__ = ["KVXferConnector"]
