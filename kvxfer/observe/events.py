# SPDX-License-Identifier: Apache-2.0
"""KV events: which blocks are in the store, for routers that place requests by what is cached.

vLLM publishes what ``take_events`` of the scheduler's connector returns beside its own events. A
block is told of when the save that has it ended on every rank with everything stored; only the
scheduler side knows tokens and parents of a block, so the events are made there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils

from kvxfer.transfer.specs import SaveSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

MAX_PENDING_BLOCKS = 65_536
"""Blocks of saves under way; those beyond are never told of, which is counted."""
MAX_TOLD_BLOCKS = 262_144
"""Blocks told of and remembered for a reset: some 50 MB. After more, a reset clears everything."""

_FIELDS = {cls: frozenset(cls.__struct_fields__) for cls in (BlockStored, BlockRemoved)}
_EXTRAS = ("lora_request", "mm_features", "cache_salt", "prompt_embeds")
"""What of a request enters its blocks' hashes beside the tokens, where it has any."""


def are_wanted(vllm_config: VllmConfig) -> bool:
    """Return whether vLLM is told to publish KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


class _Block(NamedTuple):
    """A block on its way to the store."""

    group: int
    block_hash: bytes
    request: Request
    end_tokens: int
    """Where the block ends in the request's tokens."""


class SaveEvents:
    """Makes events of saves; scheduler side, in its thread.

        note            a span of a request's tokens is among what the step saves
        ordered         the step's saves are complete: what was noted becomes theirs
        ended           ranks have ended saves: the last rank of each makes events, or drops them
        lost            a rank saw a value go, or gone: removals of those blocks that were told of
        reset           the store was emptied: removals of all that was told of, saves forgotten
        take            what is to be published

    One event a stored block: its hash, the hash before it, its tokens, its group. A save that
    failed on some rank, or was ordered before a reset, makes none. A block that is stored again is
    told of again. What other processes evict, or a pool, is lost when a load misses it, not before.
    """

    def __init__(
        self,
        block_tokens: Sequence[int],
        *,
        hash_tokens: int,
        num_ranks: int,
        store: str,
        max_pending: int = MAX_PENDING_BLOCKS,
        max_told: int = MAX_TOLD_BLOCKS,
    ) -> None:
        """``block_tokens`` and ``hash_tokens``: of each cache group's blocks, and of a hash unit.

        ``store``: its URI; the scheme in capitals is the medium of the events.
        """
        self._block_tokens, self._hash_tokens = tuple(block_tokens), hash_tokens
        self._num_ranks = num_ranks
        scheme = store.partition(":")[0]
        locality = "LOCAL" if scheme == "lmdb" else "REMOTE"  # vLLM's words
        self._place = {"medium": scheme.upper(), "locality": locality}
        self.describe_groups([(None, None)] * len(block_tokens))
        self._max_pending, self._max_told = max_pending, max_told
        self._noted: dict[bytes, tuple[Request, int]] = {}
        self._saves: dict[int, tuple[list[_Block], int]] = {}
        """Job id -> its blocks, and the ranks that have not ended it."""
        self._failed: set[int] = set()
        self._gone: set[tuple[int, bytes]] = set()
        """Blocks that were lost while saves were under way; forgotten with the last of those."""
        self._num_pending = 0
        self._told: dict[tuple[int, bytes], None] = {}
        self._forgot_some = False
        self._events: list[KVCacheEvent] = []
        self.num_dropped = 0
        """Blocks that no event told of, for want of room."""

    @property
    def num_saves(self) -> int:
        """Saves under way that will make events."""
        return len(self._saves)

    def describe_groups(self, specs: Sequence[tuple[str | None, int | None]]) -> None:
        """Say of each cache group the kind of its spec and the window, as vLLM's own events do."""
        self._of_group = [
            _known(
                BlockStored,
                self._place
                | {
                    "group_idx": group,
                    "kv_cache_spec_kind": kind,
                    "kv_cache_spec_sliding_window": window_tokens,
                },
            )
            for group, (kind, window_tokens) in enumerate(specs)
        ]

    def note(self, request: Request, start_tokens: int, end_tokens: int) -> None:
        """Say that hashes of a request's tokens [start, end) may be among the step's saves."""
        first, last = start_tokens // self._hash_tokens, -(-end_tokens // self._hash_tokens)
        hashes = request.block_hashes[first:last]
        for idx, block_hash in enumerate(hashes, first + 1):
            self._noted[block_hash] = (request, idx * self._hash_tokens)

    def ordered(self, saves: Iterable[SaveSpec]) -> None:
        """Take the saves of a step, and forget what was noted for it."""
        for save in saves:
            blocks = [
                _Block(part.group, block_hash, *self._noted[block_hash])
                for part in save.chunks
                for block_hash in part.by_hash()
                if block_hash in self._noted
            ]
            if self._num_pending + len(blocks) > self._max_pending:
                self.num_dropped += len(blocks)
                continue
            self._num_pending += len(blocks)
            self._saves[save.job_id] = (blocks, self._num_ranks)
        self._noted.clear()

    def ended(self, num_ranks: Mapping[int, int], failed: Iterable[int]) -> None:
        """Take how many ranks have ended which jobs, and which of the jobs failed on some rank."""
        self._failed.update(job for job in failed if job in self._saves)
        for job_id, number in num_ranks.items():
            if job_id not in self._saves:
                continue
            blocks, remaining = self._saves[job_id]
            if remaining > number:
                self._saves[job_id] = (blocks, remaining - number)
                continue
            del self._saves[job_id]
            self._num_pending -= len(blocks)
            if job_id in self._failed:
                self._failed.discard(job_id)
                continue
            self._events += [
                self._stored(block)
                for block in blocks
                if (block.group, block.block_hash) not in self._gone
            ]
        if not self._saves:
            self._gone.clear()

    def lost(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Tell once of blocks of which a value is gone; of one that is being saved nothing is told.

        Whether its save has put it again since, nobody can say.
        """
        for block in blocks:
            if block in self._told:
                del self._told[block]
                self._events.append(self._removed(block[0], [block[1]]))
            elif self._saves:
                self._gone.add(block)

    def reset(self, is_empty: bool) -> None:
        """Forget the saves under way; ``is_empty``: and tell that nothing is stored any more."""
        self._saves.clear()
        self._failed.clear()
        self._gone.clear()
        self._noted.clear()
        self._num_pending = 0
        if not is_empty:
            return
        if self._forgot_some:
            self._events.append(AllBlocksCleared())
        else:
            by_group: dict[int, list[bytes]] = {}
            for group, block_hash in self._told:
                by_group.setdefault(group, []).append(block_hash)
            self._events += [self._removed(*each) for each in by_group.items()]
        self._told.clear()
        self._forgot_some = False

    def take(self) -> list[KVCacheEvent]:
        """Return and forget the events."""
        events, self._events = self._events, []
        return events

    def _stored(self, block: _Block) -> KVCacheEvent:
        self._remember(block)
        request, end = block.request, block.end_tokens
        size = self._block_tokens[block.group]
        start = (end - 1) // size * size
        parent = request.block_hashes[start // self._hash_tokens - 1] if start else None
        lora = request.lora_request
        return BlockStored(
            block_hashes=[kv_cache_utils.maybe_convert_block_hash(block.block_hash)],
            parent_block_hash=(
                None if parent is None else kv_cache_utils.maybe_convert_block_hash(parent)
            ),
            token_ids=request.all_token_ids[start:end],
            block_size=end - start,
            lora_id=None if lora is None else lora.adapter_id,
            lora_name=None if lora is None else lora.name,
            extra_keys=_extra_keys(request, start, end),
            **self._of_group[block.group],
        )

    def _removed(self, group: int, block_hashes: Sequence[bytes]) -> KVCacheEvent:
        return BlockRemoved(
            block_hashes=list(map(kv_cache_utils.maybe_convert_block_hash, block_hashes)),
            **_known(BlockRemoved, self._place | {"group_idx": group}),
        )

    def _remember(self, block: _Block) -> None:
        """Remember a block for a reset; the one told of first is forgotten for it."""
        self._told[block.group, block.block_hash] = None
        if len(self._told) > self._max_told:
            del self._told[next(iter(self._told))]
            self._forgot_some = True


def _extra_keys(request: Request, start: int, end: int) -> list[tuple[Any, ...] | None] | None:
    """Return what else a block's hash depends on, as vLLM's own events say it."""
    if not any(getattr(request, name, None) for name in _EXTRAS):
        return [None]
    keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
    untag = getattr(kv_cache_utils, "to_event_extra_keys", list)  # where vLLM tags them
    extra: list[tuple[Any, ...] | None] | None = untag([keys])
    return extra


def _known(cls: type[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that an event of the installed vLLM has; older ones have fewer."""
    return {name: value for name, value in fields.items() if name in _FIELDS[cls]}
