# SPDX-License-Identifier: Apache-2.0
"""Torch tensors of the kinds that vLLM registers: dtypes, odd rows, padded and strided pages."""

import numpy as np
import pytest

from kvxfer.blocks import BlockLayout, Region, gather, scatter
from kvxfer.errors import LayoutError

torch = pytest.importorskip("torch")

PATTERN = 0xA5
NUM_BLOCKS = 5
PADDING_BYTES = 48
PAGES = {
    "bf16": (torch.bfloat16, (16, 8, 64)),
    "fp16": (torch.float16, (16, 8, 64)),
    "fp32": (torch.float32, (16, 2, 64)),
    "fp8": (torch.float8_e4m3fn, (16, 8, 128)),
    "fp8_mla": (torch.uint8, (64, 1, 656)),
    "indexer": (torch.uint8, (64, 1, 132)),
    "odd_state": (torch.int8, (1, 1, 49380)),
    "mamba": (torch.int8, (1, 1, 19840)),
}


class Pages:
    """Blocks [token][head][content] with free bytes after each, over memory that tests look at."""

    def __init__(self, dtype, shape):
        item_bytes = torch.empty(0, dtype=dtype).element_size()
        page_bytes = int(np.prod(shape)) * item_bytes
        step_bytes = page_bytes + PADDING_BYTES
        self.memory = np.full(NUM_BLOCKS * step_bytes, PATTERN, dtype=np.uint8)
        self.bytes = self.memory.reshape(NUM_BLOCKS, step_bytes)[:, :page_bytes]
        strides = (step_bytes // item_bytes, shape[1] * shape[2], shape[2], 1)
        items = torch.from_numpy(self.memory).view(dtype)
        self.tensor = torch.as_strided(items, (NUM_BLOCKS, *shape), strides)

    def fill(self):
        self.bytes[...] = np.random.default_rng(1).integers(0, 256, self.bytes.shape)


@pytest.fixture(params=PAGES, ids="page={}".format)
def make_pages(request):
    return lambda: Pages(*PAGES[request.param])


@pytest.mark.parametrize("make_rows", [torch.full, np.full], ids=["torch", "numpy"])
def test_torch_pages_are_gathered_byte_by_byte(make_pages, make_rows):
    pages = make_pages()
    pages.fill()
    source = pages.memory.copy()
    layout = BlockLayout.from_tensors([pages.tensor])
    dtype = torch.uint8 if make_rows is torch.full else np.uint8
    out = make_rows((3, layout.value_bytes), PATTERN, dtype=dtype)
    gather(layout, torch.tensor([4, 0, 2]), out, torch.tensor([True, False, True]))
    assert np.array_equal(np.asarray(out)[[0, 2]], pages.bytes[[4, 2]])
    assert (np.asarray(out)[1] == PATTERN).all()
    assert np.array_equal(pages.memory, source)


def test_torch_pages_are_scattered_byte_by_byte(make_pages):
    pages, expected = make_pages(), make_pages()
    layout = BlockLayout.from_tensors([pages.tensor])
    source = torch.randint(0, 256, (2, layout.value_bytes), dtype=torch.uint8)
    expected.bytes[[4, 1]] = source.numpy()
    scatter(layout, [4, 1], source)
    assert np.array_equal(pages.memory, expected.memory)


def test_torch_tensors_of_any_strides_give_their_logical_order():
    tensor = torch.arange(4 * 3 * 5, dtype=torch.int32).reshape(5, 3, 4).permute(2, 0, 1)
    out = torch.empty((4, 60), dtype=torch.uint8)
    gather(BlockLayout.from_tensors([tensor]), range(4), out)
    assert torch.equal(out.view(torch.int32).reshape(4, 5, 3), tensor)


def test_torch_tensors_of_another_device_are_refused():
    tensor = torch.empty((4, 8), dtype=torch.uint8, device="meta")
    layout = BlockLayout.from_tensors([tensor])
    assert layout.device == "meta"
    with pytest.raises(LayoutError, match="the layout's tensors are on meta, the host path needs"):
        gather(layout, [0], torch.empty((1, 8), dtype=torch.uint8))
    with pytest.raises(LayoutError, match="tensors are on cpu and meta"):
        BlockLayout.from_tensors([tensor, torch.empty((4, 8))])


def test_torch_rows_of_another_device_or_type_are_refused():
    layout = BlockLayout.from_tensors([torch.empty((4, 8), dtype=torch.uint8)])
    with pytest.raises(LayoutError, match="out is on meta"):
        gather(layout, [0], torch.empty((1, 8), dtype=torch.uint8, device="meta"))
    with pytest.raises(LayoutError, match="out is bool of shape"):
        gather(layout, [0], torch.empty((1, 8), dtype=torch.bool))


def test_torch_expanded_tensors_are_refused():
    with pytest.raises(LayoutError, match="a repeats the same bytes along dimension 1"):
        Region(torch.zeros((4, 1, 8)).expand(4, 16, 8), 0, "a", axes=("block", "token", "content"))
