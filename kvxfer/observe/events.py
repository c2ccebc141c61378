# SPDX-License-Identifier: Apache-2.0
"""KV events: which blocks are in the store, for routers that place requests by what is cached.

vLLM publishes what ``take_events`` of the scheduler's connector returns beside its own events. A
block is told of when the save that has it ended on every rank with everything stored; only the
scheduler side knows tokens and parents of a block, so the events are made there.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from msgspec.structs import replace
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils

from kvxfer.transfer.specs import Chunks, SaveSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

MAX_PENDING_BLOCKS = 65_536
"""Blocks of saves under way; those beyond are never told of, which is counted. Some 30 MB."""
MAX_TOLD_BLOCKS = 262_144
"""Blocks told of and remembered for a reset: some 50 MB. After more, a reset clears everything."""

_FIELDS = {cls: frozenset(cls.__struct_fields__) for cls in (BlockStored, BlockRemoved)}


def are_wanted(vllm_config: VllmConfig) -> bool:
    """Return whether vLLM is told to publish KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


Span: TypeAlias = "tuple[Request, int, int]"
"""Tokens [start, end) of a request."""


class _Stored(NamedTuple):
    """Blocks of one group on their way to the store, and what is told of each once it is there."""

    group: int
    hashes: Sequence[bytes]
    events: Sequence[BlockStored]

    def without(self, gone: Collection[tuple[int, bytes]]) -> _Stored:
        """Return those that are not among the gone ones."""
        kept = [(self.group, each) not in gone for each in self.hashes]
        return _Stored(
            self.group, list(compress(self.hashes, kept)), list(compress(self.events, kept))
        )


class SaveEvents:
    """Makes events of saves; scheduler side, in its thread.

        note            spans of requests' tokens are among what the step saves
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
        a_hash = bytes(32)
        self._publishes_numbers = kv_cache_utils.maybe_convert_block_hash(a_hash) != a_hash
        self._max_pending = max_pending
        self._noted: list[Span] = []
        self._saves: dict[int, tuple[list[_Stored], int]] = {}
        """Job id -> its blocks, and the ranks that have not ended it."""
        self._failed: set[int] = set()
        self._gone: set[tuple[int, bytes]] = set()
        """Blocks that were lost while saves were under way; forgotten with the last of those."""
        self._num_pending = 0
        self._told = _ToldBlocks(len(block_tokens), max_told)
        self._events: list[KVCacheEvent] = []
        self.num_dropped = 0
        """Blocks that no event told of, for want of room."""

    @property
    def num_saves(self) -> int:
        """Saves under way that will make events."""
        return len(self._saves)

    def describe_groups(self, specs: Sequence[tuple[str | None, int | None]]) -> None:
        """Say of each cache group the kind of its spec and the window, as vLLM's own events do."""
        self._like = [
            BlockStored(
                block_hashes=[],
                parent_block_hash=None,
                token_ids=[],
                block_size=0,
                lora_id=None,
                lora_name=None,
                extra_keys=[None],  # one list for all: nobody changes events
                **_known(
                    BlockStored,
                    self._place
                    | {
                        "group_idx": group,
                        "kv_cache_spec_kind": kind,
                        "kv_cache_spec_sliding_window": window_tokens,
                    },
                ),
            )
            for group, (kind, window_tokens) in enumerate(specs)
        ]

    def note(self, spans: Iterable[Span]) -> None:
        """Say that the step may save blocks that end within ``spans``.

        All of their tokens have been hashed, and a hash ends where a span does.
        """
        self._noted.extend(spans)

    def ordered(self, saves: Iterable[SaveSpec]) -> None:
        """Take the saves of a step, and forget what was noted for it."""
        noted, self._noted = _Noted(self._noted, self._hash_tokens), []
        for save in saves:
            found = [(part.group, *noted.find(part)) for part in save.chunks]
            num_blocks = sum(len(hashes) for _, hashes, _ in found)
            if self._num_pending + num_blocks > self._max_pending:
                self.num_dropped += num_blocks
                continue
            self._num_pending += num_blocks
            self._saves[save.job_id] = ([self._stored(*each) for each in found], self._num_ranks)

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
            self._num_pending -= sum(len(each.hashes) for each in blocks)
            if job_id in self._failed:
                self._failed.discard(job_id)
                continue
            for each in blocks:
                stored = each.without(self._gone) if self._gone else each
                self._events += stored.events
                self._told.add(stored.group, stored.hashes)
        if not self._saves:
            self._gone.clear()

    def lost(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Tell once of blocks of which a value is gone; of one that is being saved nothing is told.

        Whether its save has put it again since, nobody can say.
        """
        removed: dict[int, list[bytes]] = {}
        for block in blocks:
            group, block_hash = block
            if self._told.discard(group, block_hash):
                removed.setdefault(group, []).append(block_hash)
            elif self._saves:
                self._gone.add(block)
        self._events += [self._removed(*each) for each in removed.items()]

    def reset(self, is_empty: bool) -> None:
        """Forget the saves under way; ``is_empty``: and tell that nothing is stored any more."""
        self._saves.clear()
        self._failed.clear()
        self._gone.clear()
        self._noted.clear()
        self._num_pending = 0
        if not is_empty:
            return
        if self._told.forgot_some:
            self._events.append(AllBlocksCleared())
        else:
            told = enumerate(self._told.by_group())
            self._events += [self._removed(group, hashes) for group, hashes in told if hashes]
        self._told.clear()

    def take(self) -> list[KVCacheEvent]:
        """Return and forget the events."""
        events, self._events = self._events, []
        return events

    def _stored(self, group: int, hashes: Sequence[bytes], spans: Sequence[Span]) -> _Stored:
        """Make events of blocks, each given as its hash and a span that ends where it does.

        It is done when a save is ordered, while the requests are at hand: only to be told later.
        """
        size, hash_tokens, like = self._block_tokens[group], self._hash_tokens, self._like[group]
        published = self._published(hashes)
        ids, events = published.iter_unpack(b"".join(hashes)), []
        for block_id, (request, _, end) in zip(ids, spans, strict=True):
            start = (end - 1) // size * size
            parent = request.block_hashes[start // hash_tokens - 1]  # any, at the first block
            event = replace(
                like,
                block_hashes=[*block_id],
                parent_block_hash=published.unpack(parent)[0] if start else None,
                token_ids=request.all_token_ids[start:end],
                block_size=end - start,
            )
            if (
                request.lora_request
                or request.mm_features
                or request.cache_salt
                or request.prompt_embeds is not None
            ):
                _say_extras(event, request, start)
            events.append(event)
        return _Stored(group, hashes, events)

    def _removed(self, group: int, hashes: Sequence[bytes]) -> BlockRemoved:
        ids = self._published(hashes).iter_unpack(b"".join(hashes))
        return BlockRemoved(
            block_hashes=[block_id for (block_id,) in ids],
            **_known(BlockRemoved, self._place | {"group_idx": group}),
        )

    def _published(self, hashes: Sequence[bytes]) -> struct.Struct:
        """Return how to read what vLLM publishes from such a hash: itself, or a 64-bit number.

        vLLM asks an environment variable at every hash, for longer than all else here takes.
        """
        num_bytes = len(hashes[0]) if hashes else 8
        layout = f">{num_bytes - 8}xQ" if self._publishes_numbers else f"{num_bytes}s"
        return struct.Struct(layout)


class _Noted:
    """What a step noted, as far as saves ask: most save one block of each request, in order."""

    def __init__(self, spans: Sequence[Span], hash_tokens: int) -> None:
        self._spans, self._hash_tokens = spans, hash_tokens
        self._last = [request.block_hashes[end // hash_tokens - 1] for request, _, end in spans]
        self._last_joined = b"".join(self._last)

    def find(self, chunks: Chunks) -> tuple[Sequence[bytes], Sequence[Span]]:
        """Return the hashes of those chunks that were noted, and a span that ends with each."""
        at, within = divmod(self._last_joined.find(chunks.hashes), max(1, chunks.hash_bytes))
        if within == 0:
            stop = at + len(chunks)
            return self._last[at:stop], self._spans[at:stop]
        known = [each for each in chunks.by_hash() if each in self._units]
        return known, [self._units[each] for each in known]

    @cached_property
    def _units(self) -> dict[bytes, Span]:
        """Every hash unit, by its hash."""
        size = self._hash_tokens
        return {
            request.block_hashes[idx]: (request, idx * size, (idx + 1) * size)
            for request, start, end in self._spans
            for idx in range(start // size, end // size)
        }


class _ToldBlocks:
    """The blocks last told of, for removals: between half of ``max_blocks`` and as many.

    In two generations, the older of which is forgotten whole, in 3 ms every 131,072 blocks: to
    forget the first of a dict one by one takes ever longer, since it looks for it among all that
    were deleted, and an ``OrderedDict`` takes the scheduler's steps three times as long.
    """

    def __init__(self, num_groups: int, max_blocks: int) -> None:
        self._num_groups, self._max_blocks = num_groups, max_blocks
        self.clear()

    def clear(self) -> None:
        """Know nothing, and have forgotten nothing."""
        self._young, self._old = self._empty(), self._empty()
        self.forgot_some = False

    def add(self, group: int, hashes: Sequence[bytes]) -> None:
        """Remember blocks of a group."""
        if 2 * (sum(map(len, self._young)) + len(hashes)) > self._max_blocks:
            self.forgot_some = self.forgot_some or any(self._old)
            self._old, self._young = self._young, self._empty()
        self._young[group].update(dict.fromkeys(hashes))

    def discard(self, group: int, block_hash: bytes) -> bool:
        """Forget a block; False if it was not known."""
        was_young = self._young[group].pop(block_hash, False) is None
        was_old = self._old[group].pop(block_hash, False) is None
        return was_young or was_old

    def by_group(self) -> list[list[bytes]]:
        """Return the hashes of each group, those told of first at the front."""
        return [list(old | young) for old, young in zip(self._old, self._young, strict=True)]

    def _empty(self) -> list[dict[bytes, None]]:
        return [{} for _ in range(self._num_groups)]


def _say_extras(event: BlockStored, request: Request, start: int) -> None:
    """Say what else a block's hash depends on, as vLLM's own events do."""
    lora, end = request.lora_request, start + event.block_size
    if lora is not None:
        event.lora_id, event.lora_name = lora.adapter_id, lora.name
    keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
    untag = getattr(kv_cache_utils, "to_event_extra_keys", list)  # where vLLM tags them
    event.extra_keys = untag([keys])


def _known(cls: type[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that an event of the installed vLLM has; older ones have fewer."""
    return {name: value for name, value in fields.items() if name in _FIELDS[cls]}
