# SPDX-License-Identifier: Apache-2.0
"""A load covers what vLLM's core allocates for a hit, below a window too."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvxfer.hits import Coordinator
from kvxfer.vllm_specs.groups import cache_group_from_spec

BLOCK_TOKENS = 16
SIZES = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
HIT_TOKENS = 12 * BLOCK_TOKENS


def first_block_allocated(spec):
    """Return the first block of a hit that vLLM's manager does not leave out."""
    manager = SimpleNamespace(
        sliding_window=spec.sliding_window, extra_retained_tokens=spec.extra_retained_tokens
    )
    return SlidingWindowManager.get_num_skipped_tokens(manager, HIT_TOKENS) // BLOCK_TOKENS


@pytest.mark.parametrize("extra_tokens", [0, 1, 3, 16, 40], ids="extra={}".format)
@pytest.mark.parametrize("window_tokens", [2, 16, 17, 64, 65], ids="window={}".format)
@pytest.mark.parametrize("kind", [SlidingWindowSpec, SlidingWindowMLASpec])
def test_window_covers_what_the_core_allocates(kind, window_tokens, extra_tokens):
    spec = kind(**SIZES, sliding_window=window_tokens, extra_retained_tokens=extra_tokens)
    group = cache_group_from_spec(spec, eagle=False)
    (mask,) = Coordinator([group], BLOCK_TOKENS, BLOCK_TOKENS).load_mask(HIT_TOKENS)
    assert mask.argmax() == first_block_allocated(spec)
    assert mask[first_block_allocated(spec) :].all()


def test_windows_of_listed_layers_are_as_wide():
    spec = SlidingWindowSpec(**SIZES, sliding_window=64, extra_retained_tokens=3)
    listed = UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs={"a": spec, "b": spec})
    assert cache_group_from_spec(listed, eagle=False).covered_tokens == 67


def test_groups_of_the_same_width_are_searched_as_one():
    wide = SlidingWindowSpec(**SIZES, sliding_window=67)
    widened = SlidingWindowSpec(**SIZES, sliding_window=64, extra_retained_tokens=3)
    groups = [cache_group_from_spec(spec, eagle=False) for spec in (wide, widened)]
    assert groups[0].spec_id == groups[1].spec_id
    assert groups[0].covered_tokens == groups[1].covered_tokens == 67
