# SPDX-License-Identifier: Apache-2.0
"""Engines with any strides, and what their values must be: slow, obvious, free of addresses.

A model has logical content: per layer an array [block][part][token][head][content]. An engine puts
it into memory in its own way; `expected_value` writes a value down from the content alone.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from kvxfer.blocks import Region

PATTERN = 0xA5
AXES = ("block", "part", "token", "head", "content")


@dataclass(frozen=True)
class Layer:
    """What a layer means: the same for every engine."""

    group: int
    num_parts: int
    num_tokens: int
    heads: tuple[int, int] | None
    num_heads: int
    content: int
    item_bytes: int

    @property
    def block_shape(self):
        return (self.num_parts, self.num_tokens, self.num_heads, self.content)

    @property
    def dtype(self):
        return np.dtype(f"V{self.item_bytes}")


@dataclass(frozen=True)
class Placement:
    """How one engine lays out a layer."""

    order: tuple[int, ...]
    """AXES from the outermost in."""
    paddings: tuple[int, ...]
    """Bytes left free after each axis of ``order``, from the innermost out."""
    backwards: frozenset[int]
    """AXES that run from high addresses to low ones."""
    kernel_blocks: int
    offset: int
    """Of the first byte in its memory; odd ones included."""


@dataclass(frozen=True)
class PlacedLayer:
    """A layer in an engine's memory, all of it pattern until it is filled."""

    layer: Layer
    memory: np.ndarray
    tensor: np.ndarray
    """As registered: kernel blocks, then the other AXES."""
    kernel_blocks: int

    def write(self, content, blocks):
        """Put those ``blocks`` of (blocks, parts, tokens, heads, content) into the tensor."""
        for idx, tokens in self._kernel_blocks(blocks):
            self.tensor[idx] = content[idx // self.kernel_blocks][:, tokens]

    def read(self, num_blocks):
        """Return the tensor's content as (blocks, parts, tokens, heads, content)."""
        content = np.empty((num_blocks, *self.layer.block_shape), dtype=self.layer.dtype)
        for idx, tokens in self._kernel_blocks(range(num_blocks)):
            content[idx // self.kernel_blocks][:, tokens] = self.tensor[idx]
        return content

    def _kernel_blocks(self, blocks):
        """Yield the kernel blocks of ``blocks``, and which tokens of the block each holds."""
        tokens = self.tensor.shape[2]
        for block in blocks:
            for part in range(self.kernel_blocks):
                yield block * self.kernel_blocks + part, slice(part * tokens, (part + 1) * tokens)

    def region(self, name):
        return Region(
            tensor=self.tensor,
            group=self.layer.group,
            layer=name,
            axes=AXES,
            kernel_blocks_per_block=self.kernel_blocks,
            heads=self.layer.heads,
        )


def place(layer, placement, num_blocks):
    """Return a layer in new memory, laid out as ``placement`` says."""
    num_parts, num_tokens, num_heads, content = layer.block_shape
    kernel_blocks = placement.kernel_blocks
    shape = (
        num_blocks * kernel_blocks,
        num_parts,
        num_tokens // kernel_blocks,
        num_heads,
        content,
    )
    strides = [0] * len(AXES)
    extent = layer.item_bytes
    for axis, padding in zip(reversed(placement.order), placement.paddings, strict=True):
        strides[axis] = extent
        extent = extent * shape[axis] + padding
    memory = np.full(placement.offset + extent + 32, PATTERN, dtype=np.uint8)
    start = placement.offset
    for axis in placement.backwards:
        start += (shape[axis] - 1) * strides[axis]
        strides[axis] = -strides[axis]
    tensor = np.ndarray(shape, layer.dtype, memory, start, strides)
    return PlacedLayer(layer, memory, tensor, kernel_blocks)


def random_content(layers, num_blocks, seed):
    """Return content per layer, (blocks, parts, tokens, heads, content) of opaque items."""
    rng = np.random.default_rng(seed)
    contents = []
    for layer in layers:
        shape = (num_blocks, *layer.block_shape)
        data = rng.bytes(int(np.prod(shape)) * layer.item_bytes)
        contents.append(np.frombuffer(data, dtype=layer.dtype).reshape(shape))
    return contents


def expected_value(layers, contents, block, group, heads, value_order):
    """Return the value of one shard of one block, byte by byte from the content."""
    value = b""
    for layer, content in zip(layers, contents, strict=True):
        if layer.group != group or (layer.heads is None) != (heads is None):
            continue
        segment = content[block]
        if heads is not None:
            segment = segment[:, :, heads[0] - layer.heads[0] : heads[1] - layer.heads[0]]
        if value_order == "head_major":
            segment = segment.transpose(0, 2, 1, 3)
        value += b"\0" * (-len(value) % 16) + segment.tobytes()
    return value


@st.composite
def models(draw):
    """Draw (layers, heads per shard): up to three layers in up to two groups."""
    shard_heads = draw(st.integers(1, 3))
    first = draw(st.integers(0, 2)) * shard_heads
    held = (first, first + shard_heads * draw(st.integers(1, 3)))
    num_tokens = draw(st.sampled_from([1, 2, 4, 6]))
    layers = []
    for group in sorted(draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))):
        heads = draw(st.sampled_from([held, None])) if group else held
        layers.append(
            Layer(
                group=group,
                num_parts=draw(st.integers(1, 2)),
                num_tokens=num_tokens,
                heads=heads,
                num_heads=held[1] - held[0] if heads else draw(st.integers(1, 3)),
                content=draw(st.sampled_from([1, 3, 8, 64])),
                item_bytes=draw(st.sampled_from([1, 2, 3, 4])),
            )
        )
    return layers, shard_heads


@st.composite
def placements(draw, layer):
    """Draw how an engine lays out a layer: usually sensibly, sometimes in any way at all."""
    usual = [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (3, 0, 1, 2, 4), (1, 0, 2, 3, 4)]
    order = st.one_of(st.sampled_from(usual), st.permutations(range(5)).map(tuple))
    padding = st.sampled_from([0, 0, 0, 1, 4, 16, 48])
    ratios = [ratio for ratio in (1, 2, 3) if layer.num_tokens % ratio == 0]
    return Placement(
        order=draw(order),
        paddings=tuple(draw(st.lists(padding, min_size=5, max_size=5))),
        backwards=draw(st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, 4)))),
        kernel_blocks=draw(st.sampled_from(ratios)),
        offset=draw(st.sampled_from([0, 1, 2, 16, 64])),
    )
