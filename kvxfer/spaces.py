# SPDX-License-Identifier: Apache-2.0
"""The key spaces of one rank: which it holds, which it saves, and which a hit needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvxfer.blocks import BlockLayout
from kvxfer.keys import KeySpace, key_prefix, reset_prefix
from kvxfer.vllm_specs import EngineFacts, LayerSet, ValueNames


class RankSpaces:
    """Maps each cache group to key spaces; worker side, made once the layout is known.

    ``held``: shards that lie in this rank's KV cache, which it loads. ``saved``: the same, with
    its share of their chunks: ranks that hold the same bytes save in turn, by a chunk's hash.
    ``all_shards``: what a chunk consists of over all ranks, so that rank 0 can tell whether it is
    whole. A rank can derive it for its own pipeline stage; of others it is told
    (``set_all_shards``), and knows nothing before.
    """

    def __init__(
        self, cache_prefix: str, facts: EngineFacts, names: ValueNames, layout: BlockLayout
    ) -> None:
        self.reset_prefix = reset_prefix(cache_prefix, names.model)
        self.held: dict[int, list[KeySpace]] = {}
        self.saved: dict[int, list[KeySpace]] = {}
        self.all_shards: dict[int, list[KeySpace]] = {}
        classes = {(c.group, c.heads): (i, c.value_bytes) for i, c in enumerate(layout.classes)}
        for set_idx, layer_set, name in _named_sets(facts, names):
            for shard in layer_set.shards():
                prefix = key_prefix(
                    cache_prefix, names.model, names.digest, name, facts.pp_rank, *shard
                )
                class_id, value_bytes = -1, 0
                if shard.context_rank == layer_set.context_rank:
                    class_id, value_bytes = classes.get((set_idx, shard.heads), (-1, 0))
                space = KeySpace(layer_set.group, prefix, class_id, value_bytes)
                self.all_shards.setdefault(layer_set.group, []).append(space)
                if class_id >= 0:
                    self.held.setdefault(layer_set.group, []).append(space)
                    turn = replace(space, turn=layer_set.replica, num_turns=layer_set.num_replicas)
                    self.saved.setdefault(layer_set.group, []).append(turn)
        if facts.pp_size > 1:
            self.all_shards = {}

    def set_all_shards(self, key_prefixes: Iterable[tuple[int, bytes]]) -> None:
        """Take the (cache group, key prefix) pairs of all ranks."""
        shards: dict[int, list[KeySpace]] = {}
        for group, prefix in key_prefixes:
            shards.setdefault(group, []).append(KeySpace(group, prefix))
        self.all_shards = shards


def _named_sets(facts: EngineFacts, names: ValueNames) -> Iterator[tuple[int, LayerSet, str]]:
    for set_idx, (layer_set, name) in enumerate(zip(facts.layer_sets, names.groups, strict=True)):
        yield set_idx, layer_set, name
