# SPDX-License-Identifier: Apache-2.0
"""The six tensor layouts of vLLM, made by vLLM itself: all of them give the same values."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import numpy as np
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvxfer.blocks import ITEM_DTYPE, BlockLayout, Region, gather, gather_items, scatter

NUM_BLOCKS, NUM_LAYERS, NUM_HEADS = 5, 3, 4
PATTERN = -91
LAYOUTS = pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda each: each.name)
COMPACT = [each for each in KVCacheLayout if each.is_layer_compact and each.is_block_compact]


def engine(spec, layout, kernel_tokens=None):
    """Return (raw int8 memory, one view per layer) as vLLM lays them out."""
    strides = compute_layout_strides(spec, NUM_BLOCKS, NUM_LAYERS, layout)
    layer_stride, block_stride = strides[:2]
    raw_bytes = NUM_LAYERS * NUM_BLOCKS * spec.page_size_bytes
    raw = torch.full((raw_bytes,), PATTERN, dtype=torch.int8)
    place = KVCacheTensor(
        size=raw_bytes,
        layers=[f"layer{idx}" for idx in range(NUM_LAYERS)],
        layer_stride=layer_stride,
        block_stride=block_stride,
    )
    views = create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, place, kernel_tokens)
    return SimpleNamespace(raw=raw, views=views, kernel_blocks=views[0].shape[0] // NUM_BLOCKS)


def attention_spec():
    return FullAttentionSpec(
        block_size=16, num_kv_heads=NUM_HEADS, head_size=8, dtype=torch.bfloat16
    )


def content(shape):
    """Return bf16 numbers per layer, (layers, *shape)."""
    return torch.randn((NUM_LAYERS, *shape), generator=torch.Generator().manual_seed(5)).bfloat16()


def layout_of(made, *, heads=None, **kwargs):
    regions = [
        Region(
            view,
            0,
            f"layer{idx}",
            kernel_blocks_per_block=made.kernel_blocks,
            heads=heads,
        )
        for idx, view in enumerate(made.views)
    ]
    return BlockLayout.from_regions(regions, num_blocks=NUM_BLOCKS, **kwargs)


def values_of(layout):
    """Return every value of every class, (classes, blocks, value_bytes)."""
    shape = (len(layout.classes), NUM_BLOCKS, layout.classes[0].value_bytes)
    out = np.full(shape, 0xA5, dtype=np.uint8)
    items = np.zeros(shape[:2], dtype=ITEM_DTYPE)
    items["value_ptr"] = out.ctypes.data + np.arange(items.size).reshape(shape[:2]) * shape[2]
    items["block_id"] = np.arange(NUM_BLOCKS)
    items["class_id"] = np.arange(len(layout.classes))[:, None]
    gather_items(layout, items.ravel())
    return out


def expected_values(logical, order):
    """Return (blocks, value_bytes) of content (layers, blocks, heads, tokens, content)."""
    axes = (1, 0, 3, 2, 4) if order == "token_major" else (1, 0, 2, 3, 4)
    data = logical.permute(axes).contiguous().view(torch.uint8)
    return data.reshape(NUM_BLOCKS, -1).numpy()


@LAYOUTS
@pytest.mark.parametrize("order", ["token_major", "head_major"])
def test_vllm_layouts_give_the_same_values(layout, order):
    made = engine(attention_spec(), layout)
    logical = content(made.views[0].shape)
    for view, layer in zip(made.views, logical, strict=True):
        view.copy_(layer)
    plan = layout_of(made, value_order=order)
    assert np.array_equal(values_of(plan)[0], expected_values(logical, order))


@LAYOUTS
@pytest.mark.parametrize("order", ["token_major", "head_major"])
def test_vllm_layouts_give_the_same_values_by_head_shard(layout, order):
    made = engine(attention_spec(), layout)
    logical = content(made.views[0].shape)
    for view, layer in zip(made.views, logical, strict=True):
        view.copy_(layer)
    plan = layout_of(made, heads=(8, 12), head_shard=2, value_order=order)
    assert [each.heads for each in plan.classes] == [(8, 10), (10, 12)]
    for shard, values in enumerate(values_of(plan)):
        expected = expected_values(logical[:, :, 2 * shard : 2 * shard + 2], order)
        assert np.array_equal(values, expected)


@LAYOUTS
def test_vllm_layouts_scatter_what_another_gathered(layout):
    source, target = engine(attention_spec(), KVCacheLayout.LBNHC), engine(attention_spec(), layout)
    logical = content(source.views[0].shape)
    for view, layer in zip(source.views, logical, strict=True):
        view.copy_(layer)
    before = [view.clone() for view in target.views]
    values = values_of(layout_of(source, value_order="token_major"))[0]
    blocks = [3, 0]
    scatter(layout_of(target, value_order="token_major"), blocks, values[blocks])
    untouched = [idx for idx in range(NUM_BLOCKS) if idx not in blocks]
    for view, layer, old in zip(target.views, logical, before, strict=True):
        assert torch.equal(view[blocks], layer[blocks])
        assert view[untouched].view(torch.int8).equal(old[untouched].view(torch.int8))


@LAYOUTS
def test_vllm_layouts_lie_in_the_native_order_that_their_name_says(layout):
    plan = layout_of(engine(attention_spec(), layout))
    heads_first = layout.name.index("H") < layout.name.index("N")
    assert plan.value_order == ("head_major" if heads_first else "token_major")


@pytest.mark.parametrize("layout", COMPACT, ids=lambda each: each.name)
@pytest.mark.parametrize("order", ["token_major", "head_major"])
def test_vllm_kernel_blocks_give_the_values_of_whole_blocks(layout, order):
    whole, split = engine(attention_spec(), layout), engine(attention_spec(), layout, 4)
    assert split.kernel_blocks == 4
    logical = content(whole.views[0].shape)
    for layer, of_whole, of_split in zip(logical, whole.views, split.views, strict=True):
        of_whole.copy_(layer)
        tokens = layer.unflatten(2, (4, 4)).permute(0, 2, 1, 3, 4)  # [block][kernel block][head]...
        of_split.copy_(tokens.flatten(0, 1))
    pair = [values_of(layout_of(made, value_order=order)) for made in (whole, split)]
    assert np.array_equal(*pair)


def test_vllm_padded_mla_pages_leave_the_padding_out():
    spec = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=656, dtype=torch.uint8, alignment=4096
    )
    made = engine(spec, KVCacheLayout.LBNHC)
    assert spec.page_size_bytes > 64 * 656
    plan = layout_of(made)
    source = np.random.default_rng(2).integers(0, 256, (2, plan.value_bytes), dtype=np.uint8)
    untouched = np.ones(made.raw.numel(), dtype=bool)
    for layer in range(NUM_LAYERS):
        for block in (4, 1):
            start = (layer * NUM_BLOCKS + block) * spec.page_size_bytes
            untouched[start : start + 64 * 656] = False
    scatter(plan, [4, 1], source)
    assert (made.raw.numpy()[untouched] == PATTERN).all()
    out = np.zeros_like(source)
    gather(plan, [4, 1], out)
    assert np.array_equal(out, source)
    assert [made.views[0].shape[0], plan.value_bytes] == [NUM_BLOCKS, NUM_LAYERS * 64 * 656]


def test_vllm_mamba_states_leave_the_padding_out():
    spec = MambaSpec(
        block_size=64,
        shapes=((3, 200), (8, 16)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=4096,
    )
    made = engine(spec, KVCacheLayout.LBHNC)
    state_bytes = 3 * 200 * 2 + 8 * 16 * 4
    assert tuple(made.views[0].shape) == (NUM_BLOCKS, 1, 1, state_bytes)
    plan = layout_of(made, heads=(1, 2), head_shard=1)
    assert [each.heads for each in plan.classes] == [(1, 2)]
    source = np.random.default_rng(2).integers(0, 256, (1, plan.value_bytes), dtype=np.uint8)
    scatter(plan, [2], source)
    for segment, view in zip(plan.classes[0].segments, made.views, strict=True):
        stored = source[0, segment.value_offset : segment.value_offset + state_bytes]
        assert view[2].ravel().numpy().tobytes() == stored.tobytes()
    assert (made.raw == PATTERN).sum() >= made.raw.numel() - NUM_LAYERS * state_bytes
