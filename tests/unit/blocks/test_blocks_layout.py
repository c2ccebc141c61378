# SPDX-License-Identifier: Apache-2.0
"""Classes, segments and value order of a layout, and what it refuses."""

import gc
import weakref

import numpy as np
import pytest

from kvxfer.blocks import BlockLayout, Region, Segment
from kvxfer.errors import LayoutError

TOKEN_MAJOR = ("block", "token", "head", "content")


def cache(*shape, dtype=np.uint8):
    return np.zeros(shape, dtype=dtype)


def test_layout_segments_start_at_multiples_of_16():
    layout = BlockLayout.from_tensors([cache(4, 5), cache(4, 3, 11), cache(4, 16), cache(4, 1)])
    assert layout.classes[0].segments == (
        Segment("tensors[0]", 0, 5),
        Segment("tensors[1]", 16, 33),
        Segment("tensors[2]", 64, 16),
        Segment("tensors[3]", 80, 1),
    )
    assert layout.value_bytes == 81


def test_layout_from_tensors_is_one_logical_class():
    layout = BlockLayout.from_tensors([cache(4, 5)])
    assert (layout.value_order, layout.device, layout.num_blocks) == ("logical", "cpu", 4)
    assert [(c.group, c.heads) for c in layout.classes] == [(0, None)]


def test_layout_has_a_class_per_group_and_head_shard():
    regions = [
        Region(cache(4, 8, 16, 32), 1, "full", heads=(8, 16)),
        Region(cache(4, 1, 16, 64), 0, "latent"),
    ]
    layout = BlockLayout.from_regions(regions, head_shard=4, num_blocks=4)
    assert [(c.group, c.heads, c.value_bytes) for c in layout.classes] == [
        (0, None, 16 * 64),
        (1, (8, 12), 4 * 16 * 32),
        (1, (12, 16), 4 * 16 * 32),
    ]
    assert layout.class_id(1, (12, 16)) == 2
    with pytest.raises(LayoutError, match="no class of group 1 and heads None"):
        layout.class_id(1)


def test_layout_head_shard_can_differ_by_group():
    regions = [
        Region(cache(4, 4, 16, 32), 0, "wide", heads=(4, 8)),
        Region(cache(4, 2, 16, 32), 1, "narrow", heads=(2, 4)),
        Region(cache(4, 2, 16, 32), 2, "whole", heads=(2, 4)),
    ]
    layout = BlockLayout.from_regions(regions, head_shard={0: 2, 1: 1})
    assert [(c.group, c.heads) for c in layout.classes] == [
        (0, (4, 6)),
        (0, (6, 8)),
        (1, (2, 3)),
        (1, (3, 4)),
        (2, (2, 4)),
    ]


def test_layout_shards_hold_every_layer_of_their_group_in_order():
    regions = [Region(cache(4, 2, 8, 16), 0, name, heads=(0, 2)) for name in ("b", "a")]
    layout = BlockLayout.from_regions(regions, head_shard=1)
    assert [[s.layer for s in c.segments] for c in layout.classes] == [["b", "a"]] * 2


@pytest.mark.parametrize(
    ("tensor", "axes", "order"),
    [
        (cache(4, 16, 2, 8), TOKEN_MAJOR, "token_major"),
        (cache(4, 2, 16, 8), ("block", "head", "token", "content"), "head_major"),
        (cache(4, 16, 2, 8).swapaxes(1, 2), ("block", "head", "token", "content"), "token_major"),
        (cache(2, 4, 16, 8), ("head", "block", "token", "content"), "head_major"),
        (cache(4, 16, 1, 8), TOKEN_MAJOR, "token_major"),
        (cache(4, 1, 16, 8), ("block", "head", "token", "content"), "token_major"),
        (cache(4, 2, 1, 8), ("block", "head", "token", "content"), "token_major"),
        (cache(4, 100), ("block", "content"), "token_major"),
    ],
    ids=[
        "token_major",
        "head_major",
        "strides_not_axes_decide",
        "heads_outside_blocks",
        "one_head",
        "one_head_outside",
        "one_token",
        "state",
    ],
)
def test_layout_native_order_is_how_the_tensor_lies(tensor, axes, order):
    assert BlockLayout.from_regions([Region(tensor, 0, "a", axes=axes)]).value_order == order


def test_layout_native_order_ignores_what_one_head_per_shard_makes_equal():
    region = Region(cache(4, 2, 16, 8), 0, "a", heads=(0, 2))
    assert BlockLayout.from_regions([region]).value_order == "head_major"
    assert BlockLayout.from_regions([region], head_shard=1).value_order == "token_major"


def test_layout_native_order_with_one_token_per_kernel_block():
    region = Region(cache(8, 2, 1, 16), 0, "a", kernel_blocks_per_block=4)
    assert BlockLayout.from_regions([region]).value_order == "token_major"


def test_layout_native_orders_that_differ_name_the_setting():
    regions = [
        Region(cache(4, 16, 2, 8), 0, "tokens", axes=TOKEN_MAJOR),
        Region(cache(4, 2, 16, 8), 0, "heads"),
    ]
    with pytest.raises(LayoutError, match="head_major in heads and token_major in tokens; set val"):
        BlockLayout.from_regions(regions)
    assert BlockLayout.from_regions(regions, value_order="head_major").value_order == "head_major"


def test_layout_refuses_an_unknown_value_order():
    with pytest.raises(LayoutError, match="value_order is 'heads'; use native, token_major or"):
        BlockLayout.from_regions(
            [Region(cache(4, 8), 0, "a", axes=("block", "content"))], value_order="heads"
        )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"axes": ("block", "head", "token")}, "a has 4 dimensions, axes names 3"),
        ({"axes": ("block", "head", "head", "content")}, "name each once"),
        ({"axes": ("page", "head", "token", "content")}, "'block' among them"),
        ({"kernel_blocks_per_block": 3}, "4 kernel blocks, not a multiple of .*per_block=3"),
        ({"kernel_blocks_per_block": 0}, "not a multiple"),
        ({"heads": (2, 2)}, r"heads of a are \(2, 2\); give a range"),
        ({"heads": (0, 4)}, "a has 2 entries on its head axis, heads 0 to 4 are 4"),
    ],
)
def test_region_refuses_what_does_not_fit_its_tensor(kwargs, message):
    with pytest.raises(LayoutError, match=message):
        Region(cache(4, 2, 16, 8), 0, "a", **kwargs)


def test_region_refuses_what_is_no_tensor():
    with pytest.raises(LayoutError, match="the tensor of a is a list; pass a torch tensor or a Nu"):
        Region([1, 2], 0, "a")
    with pytest.raises(LayoutError, match=r"tensors\[0\] holds Python objects"):
        BlockLayout.from_tensors([np.array([[None]])])


def test_layout_refuses_shards_that_cut_a_region_in_two():
    with pytest.raises(
        LayoutError, match=r"a holds heads 4 to 8, which shards of 3 .* \(store_tp\)"
    ):
        BlockLayout.from_regions([Region(cache(4, 4, 16, 8), 0, "a", heads=(4, 8))], head_shard=3)


def test_layout_refuses_to_cut_a_tensor_without_heads():
    region = Region(cache(4, 100), 0, "state", axes=("block", "content"), heads=(0, 2))
    assert BlockLayout.from_regions([region]).classes[0].heads == (0, 2)
    with pytest.raises(LayoutError, match="state has no head axis to cut into 2 shards"):
        BlockLayout.from_regions([region], head_shard=1)


def test_layout_refuses_a_group_of_different_heads():
    regions = [
        Region(cache(4, 2, 16, 8), 0, "a", heads=(0, 2)),
        Region(cache(4, 2, 16, 8), 0, "b", heads=(2, 4)),
    ]
    with pytest.raises(LayoutError, match=r"group 0 holds heads \(0, 2\) in a and \(2, 4\) in b"):
        BlockLayout.from_regions(regions)


@pytest.mark.parametrize("make", [BlockLayout.from_regions, BlockLayout.from_tensors])
def test_layout_refuses_nothing(make):
    with pytest.raises(LayoutError, match="at least one"):
        make([])


def test_layout_refuses_a_single_tensor_for_a_list():
    with pytest.raises(LayoutError, match="pass a list"):
        BlockLayout.from_tensors(cache(4, 8))


def test_layout_refuses_a_tensor_without_a_block_axis():
    with pytest.raises(LayoutError, match=r"tensors\[0\] has no dimensions"):
        BlockLayout.from_tensors([np.array(3)])


def test_layout_refuses_different_numbers_of_blocks():
    with pytest.raises(LayoutError, match=r"tensors\[1\] has 6 blocks, the layout 4"):
        BlockLayout.from_tensors([cache(4, 8), cache(6, 8)])
    with pytest.raises(LayoutError, match=r"a \(group 0\) has 4 blocks, the layout 2; .*kernel_bl"):
        BlockLayout.from_regions([Region(cache(4, 2, 16, 8), 0, "a")], num_blocks=2)


def test_layout_refuses_tensors_that_share_their_own_bytes():
    expanded = np.broadcast_to(cache(1, 8), (4, 8))
    with pytest.raises(LayoutError, match=r"tensors\[0\] repeats the same bytes along dimension 0"):
        BlockLayout.from_tensors([expanded])


def test_layout_with_several_classes_has_no_single_value_size():
    regions = [Region(cache(4, 2, 16, 8), group, "a") for group in (0, 1)]
    with pytest.raises(LayoutError, match="2 classes of values; use items"):
        _ = BlockLayout.from_regions(regions).value_bytes


def test_layout_keeps_its_tensors_alive():
    tensor = cache(4, 8)
    alive = weakref.ref(tensor)
    layout = BlockLayout.from_tensors([tensor])
    del tensor
    gc.collect()
    assert alive() is not None
    del layout
    gc.collect()
    assert alive() is None


def test_layout_block_view_is_the_block_where_the_block_is_the_value():
    tensor = np.arange(4 * 32, dtype=np.uint8).reshape(4, 32)
    view = BlockLayout.from_tensors([tensor]).block_view(0, 2)
    assert view == tensor[2].data
    view[0] = 255
    assert tensor[2, 0] == 255


def test_layout_block_view_keeps_the_tensor_alive():
    tensor = np.ones((4, 32), dtype=np.uint8)
    alive = weakref.ref(tensor)
    view = BlockLayout.from_tensors([tensor]).block_view(0, 2)
    del tensor
    gc.collect()
    assert bytes(view) == b"\1" * 32
    del view
    gc.collect()
    assert alive() is None


def test_layout_block_view_of_a_read_only_tensor_is_read_only():
    tensor = cache(4, 32)
    tensor.flags.writeable = False
    assert BlockLayout.from_tensors([tensor]).block_view(0, 1).readonly


@pytest.mark.parametrize(
    "tensors",
    [
        [cache(4, 5), cache(4, 5)],
        [cache(4, 32), cache(4, 32)],
        [cache(4, 8, 8)[:, :, :4]],
        [cache(4, 0)],
    ],
    ids=["with_gaps", "two_places", "padded_rows", "no_bytes"],
)
def test_layout_block_view_is_none_where_bytes_must_be_put_together(tensors):
    assert BlockLayout.from_tensors(tensors).block_view(0, 0) is None


def test_layout_block_view_refuses_a_block_outside_the_pool():
    with pytest.raises(IndexError, match="block_id is 4, the layout has 4 blocks"):
        BlockLayout.from_tensors([cache(4, 8)]).block_view(0, 4)
