# SPDX-License-Identifier: Apache-2.0
"""Scheduler side: what to look up, what to load and what to save.

Calls, in vLLM's order within a step:

    get_num_new_matched_tokens    a waiting request: how many tokens can be loaded?
    update_state_after_alloc      its blocks are allocated: the load is ordered
    build_connector_meta          the step is planned: saves are ordered, their blocks pinned
    update_connector_output       the workers' events of an earlier step: pins are released
    request_finished              the request is gone; its jobs go on
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import vllm

from kvxfer.config import KVXferConfig
from kvxfer.errors import UnsupportedError
from kvxfer.lookup import Endpoint, LookupClient, reset_ranks
from kvxfer.lookup.key_spaces import KeySpacesPayload
from kvxfer.messages import KVXferHandshake, KVXferMetadata, KVXferWorkerMetadata
from kvxfer.observe.events import SaveEvents, are_wanted
from kvxfer.observe.stats import KVXferStats
from kvxfer.scheduler.chunk_planner import ChunkPlanner, HandedBlock, Tables
from kvxfer.scheduler.load_worth import LoadWorth
from kvxfer.scheduler.lookups import Lookups
from kvxfer.scheduler.metrics import SchedulerMetrics
from kvxfer.scheduler.pins import BlockPins
from kvxfer.scheduler.requests import Answer, Offer, RequestState
from kvxfer.scheduler.save_orders import SaveOrders, scheduled
from kvxfer.scheduler.sightings import Sightings
from kvxfer.transfer.specs import LoadSpec
from kvxfer.vllm_specs import (
    EngineFacts,
    check_version,
    read_config,
    read_engine,
    warn_of_settings,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class KVXferScheduler:
    """Finds hits, orders loads and saves, and holds the pins of blocks that saves read.

    Lives in the scheduler's thread; never waits for a store (a blocking lookup, where asked
    for, waits at most ``lookup_timeout_s``). Usable without the connector class. It asks the
    lookup channel with the raw number of tokens and trusts no answer that cannot be: a hit that
    leaves no token to compute, or ends off a boundary, counts as none.
    """

    def __init__(
        self,
        config: KVXferConfig,
        facts: EngineFacts,
        lookups: Lookups,
        clock: Callable[[], float] = time.monotonic,
        events: SaveEvents | None = None,
    ) -> None:
        """``events``: where stored blocks are told of; None where nobody asked for KV events."""
        self._config, self._facts, self._lookups, self._clock = config, facts, lookups, clock
        self._alignment = facts.align_tokens
        self._requests: dict[str, RequestState] = {}
        generated = facts.dense_coordinator() if config.save_decode_cache else None
        self._planner = ChunkPlanner(facts.coordinator(), generated)
        self._loads: list[LoadSpec] = []
        self._job_ids = itertools.count()
        self._epochs = itertools.count(1)
        self._endpoints = [
            Endpoint.for_engine(facts.engine_id, facts.dp_rank, rank=rank)
            for rank in range(facts.num_ranks)
        ]
        self._pins: BlockPins | None = None
        self._saves: SaveOrders | None = None
        self._events = events
        self._metrics = SchedulerMetrics(config, facts)
        self._worth = LoadWorth(
            min_tokens=config.min_load_tokens,
            measures=config.load_when == "faster",
            load_tokens_per_s=config.load_tokens_per_s,
            prefill_tokens_per_s=config.prefill_tokens_per_s,
            clock=clock,
        )
        self._sightings = Sightings(config.min_sightings)
        self.counts: Counter[str] = Counter()

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVXferScheduler:
        """Make the scheduler side of an engine; warns of settings that make it useless."""
        check_version(vllm.__version__)
        config = read_config(vllm_config)
        config.log()
        warn_of_settings(vllm_config)
        facts = read_engine(vllm_config, kv_cache_config, config)
        endpoint = Endpoint.for_engine(facts.engine_id, facts.dp_rank)
        lookups = LookupClient(
            endpoint,
            timeout_s=config.lookup_timeout_s,
            max_in_flight=config.max_lookups_in_flight,
            max_questions=config.max_open_lookups,
        )
        events = None
        if are_wanted(vllm_config):
            sizes = [group.block_tokens for group in facts.groups]
            events = SaveEvents(
                sizes, hash_tokens=facts.hash_tokens, num_ranks=facts.num_ranks, store=config.store
            )
        return cls(config, facts, lookups, events=events)

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """Take the pool whose blocks saves pin."""
        limit = self._config.max_pinned_blocks or max(1, self._facts.num_blocks // 8)
        self._pins = BlockPins(pool, num_ranks=self._facts.num_ranks, max_blocks=limit)
        self._saves = SaveOrders(
            self._config, self._facts, self._planner, self._pins, self._job_ids, self._events
        )

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Take vLLM's manager: its pool, and its block tables, which saves then read in place."""
        self.bind_gpu_block_pool(manager.block_pool)
        assert self._saves is not None
        self._saves.read_tables_from(manager)
        if self._events is not None:
            specs = getattr(manager, "kv_cache_event_metadata", None)
            if specs is not None:
                self._events.describe_groups(specs)

    # Waiting requests

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return (tokens that can be loaded beyond the local ones, whether asynchronously).

        ``(None, False)`` while the lookup is in flight; ``(0, False)`` without a lookup for a
        request shorter than one alignment unit, one that must not read the cache, and one whose
        load has failed; ``(0, False)`` also for a hit that is not worth loading.
        """
        state = self._state(request)
        state.offer = None
        state.local_tokens = num_computed_tokens
        if not self._may_load(state):
            return 0, False
        if (request.num_tokens - 1) // self._alignment * self._alignment <= num_computed_tokens:
            return 0, False  # the local hit is the longest there can be
        answer = self._answer(state)
        if answer is None:
            return None, False
        num_tokens = answer.hit_tokens - num_computed_tokens
        if num_tokens <= 0:
            return 0, False
        if answer.pays is None:
            answer.pays = self._worth.pays(num_tokens)
        if not answer.pays:
            return 0, False
        state.offer = Offer(num_computed_tokens, answer.hit_tokens, answer.tail_boundaries)
        return num_tokens, True

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Order the load of what was allocated, which may be less than what was offered.

        With 0 external tokens nothing is loaded: no offer, another connector's load, or the
        second call after an asynchronous load.
        """
        state = self._state(request)
        taken = 0 if state.offer is None else min(num_external_tokens, _tokens(state.offer))
        self._metrics.tokens.admitted(state, max(0, taken))
        offer, state.offer = state.offer, None
        state.answer = None
        state.prefill_tokens = request.num_tokens
        state.save_due_tokens = 0
        if offer is None or num_external_tokens <= 0:
            return
        hit_tokens = min(offer.hit_tokens, offer.local_tokens + num_external_tokens)
        tails = offer.tail_boundaries if hit_tokens == offer.hit_tokens else {}
        chunks = self._planner.loads(
            request, blocks.get_block_ids(), offer.local_tokens, hit_tokens, tails
        )
        self._loads.append(
            LoadSpec(
                next(self._job_ids),
                request.request_id,
                offer.local_tokens,
                hit_tokens,
                chunks or (),
                is_whole=chunks is not None,
            )
        )
        self.counts["tokens_ordered"] += hit_tokens - offer.local_tokens
        state.load = hit_tokens - offer.local_tokens, self._clock()
        state.saved_tokens = max(state.saved_tokens, hit_tokens)

    def register_finished_partial_tail(
        self, request: Request, tables: Tables, handed: Sequence[HandedBlock]
    ) -> bool:
        """Order, at a request's end, the states that the core hands over last.

        False: the save has its own pins, so the request's blocks need not wait. The order goes
        out with the next step.
        """
        state = self._requests.get(request.request_id)
        if state is not None and self._saves is not None and handed:
            self._saves.order_finished(state, tables, handed)
        return False

    def request_finished(self, request: Request) -> bool:
        """Forget the request; False: its blocks may be freed, running saves hold their own pins."""
        self._forget(request.request_id)
        return False

    # Steps

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVXferMetadata:
        """Return the jobs of this step: loads ordered since the last, saves of full blocks."""
        loads, self._loads = tuple(self._loads), []
        if self._worth.measures:
            self._worth.note_step(self._prompt_tokens(scheduler_output))
        saves = () if self._saves is None else self._saves.order(scheduler_output, self._requests)
        return KVXferMetadata(saves=saves, loads=loads)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Take the workers' events: release pins, note failed loads."""
        meta = output.kv_connector_worker_meta
        if isinstance(meta, KVXferWorkerMetadata):
            self._take_events_of_ranks(meta)
        for request_id in output.finished_recving or ():
            state = self._requests.get(request_id)
            if state is not None:
                self._metrics.tokens.load_ended(state)
                if state.load is not None and not state.load_failed:
                    num_tokens, ordered_s = state.load
                    self._worth.note_load(num_tokens, self._clock() - ordered_s)
                state.load = None

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping: for pins to be released, for events to come."""
        if self._events is not None and self._events.num_saves:
            return True
        return self._pins is not None and self._pins.num_jobs > 0

    def take_events(self) -> list[KVCacheEvent]:
        """Return and forget the KV events since the last call; none where nobody asked for them."""
        return [] if self._events is None else self._events.take()

    def take_stats(self) -> KVXferStats | None:
        """Return what this side has counted since the last call; None if nothing."""
        totals = {
            "saves_put_off": 0 if self._saves is None else self._saves.counts["saves_put_off"],
            "kv_events_dropped": 0 if self._events is None else self._events.num_dropped,
        }
        return self._metrics.take(0 if self._pins is None else self._pins.num_blocks, totals)

    def set_handshakes(self, handshakes: Sequence[KVXferHandshake]) -> None:
        """Take what the ranks said of themselves, rank 0 first, and tell it what a hit needs.

        vLLM's MultiConnector hands on one child's handshakes to all of them: what other ranks
        say than this connector's counts for nothing. Without its own, it goes by the endpoints
        that every rank of this host takes; rank 0 derives what one pipeline stage needs, and of
        several stages nothing can hit. Start-up waits here for the lookup server, so that the
        first request can hit already. UnsupportedError for an embedded store whose ranks are on
        several hosts.
        """
        names = {endpoint.path.name for endpoint in self._endpoints}
        handshakes = [each for each in handshakes if Path(each.endpoint).name in names]
        hosts = sorted({handshake.host for handshake in handshakes})
        if len(hosts) > 1 and self._config.store.startswith("lmdb:"):
            raise UnsupportedError(
                f"the embedded store is shared by one host, the ranks are on {', '.join(hosts)}; "
                'set "store" to a mooncake:// address'
            )
        if not (self._tell_key_spaces(handshakes) if handshakes else self._go_without()):
            logger.error(
                "the lookup server did not answer in %g s: lookups may all be misses. Restart the "
                "engine on a less busy machine.",
                self._config.start_timeout_s,
            )

    def reset(self) -> bool:
        """Remove what this model stored under our prefix; False if a rank did not drain in time.

        Every answer is forgotten. Saves ordered so far belong to an older epoch: workers drop
        those that have not begun and wait for the rest, and only then the keys are removed, so
        no put of this engine lands after the reset. Requests alive now never save again: part of
        their KV may be of the weights before. Waits at most ``reset_timeout_s``.
        """
        epoch = next(self._epochs)
        if self._saves is not None:
            self._saves.begin_epoch(epoch)
        for state in self._requests.values():
            self._lookups.discard(state.request.request_id)
            state.answer = state.asked_s = None
            state.may_save = False
        is_empty = reset_ranks(self._endpoints, epoch, self._config.reset_timeout_s)
        if self._events is not None:
            self._events.reset(is_empty)
        return is_empty

    def shutdown(self) -> None:
        """Close the lookup channel; idempotent."""
        self._lookups.close()

    @property
    def num_requests(self) -> int:
        """Requests that are remembered."""
        return len(self._requests)

    # Start-up, in parts

    def _tell_key_spaces(self, handshakes: Sequence[KVXferHandshake]) -> bool:
        """Tell rank 0 of the others; whether it took that."""
        said = {Path(each.endpoint).name: Path(each.endpoint) for each in handshakes}
        # vLLM loses handshakes where prefill context parallelism is all there is: derived then.
        self._endpoints = [
            Endpoint(said.get(endpoint.path.name, endpoint.path)) for endpoint in self._endpoints
        ]
        spaces = KeySpacesPayload(
            key_prefixes=tuple(dict.fromkeys(p for h in handshakes for p in h.key_prefixes)),
            eagle_groups=tuple(i for i, group in enumerate(self._facts.groups) if group.eagle),
        )
        return self._lookups.send_key_spaces(spaces.encode(), self._config.start_timeout_s)

    def _go_without(self) -> bool:
        """Wait for rank 0 alone; whether it answered."""
        if self._facts.pp_size > 1:
            logger.error(
                "vLLM handed on no handshake of this connector, so rank 0 does not know the keys "
                "of the other pipeline stages: there will be no hits. In MultiConnector, list "
                "KVXferConnector first, or set pipeline_parallel_size to 1."
            )
        return self._lookups.ping(self._config.start_timeout_s)

    # Lookups

    def _state(self, request: Request) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request:
            state = self._requests[request.request_id] = RequestState(request)
            if self._config.min_sightings > 1:
                num_worth = self._sightings.note(request.block_hashes)
                state.worth_tokens = num_worth * self._facts.hash_tokens
        return state

    def _may_load(self, state: RequestState) -> bool:
        request = state.request
        return (
            self._config.enable_lookup
            and not state.load_failed
            and request.num_tokens >= self._alignment
            and not getattr(request, "skip_reading_prefix_cache", False)
        )

    def _answer(self, state: RequestState) -> Answer | None:
        request, kept = state.request, state.answer
        if (
            kept is not None
            and kept.num_tokens == request.num_tokens
            and self._clock() < kept.expires_s
        ):
            return kept
        if state.asked_s is None:
            state.asked_s = self._clock()
        reply = self._lookups.lookup(
            request.request_id,
            request.num_tokens,
            request.block_hashes,
            blocking=not self._config.lookup_async,
        )
        if reply is None:
            return None
        now_s = self._clock()
        hit_tokens = self._believable(reply.hit_length, request.num_tokens)
        state.answer = Answer(
            hit_tokens=hit_tokens,
            tail_boundaries=dict(reply.tail_boundaries),
            num_tokens=request.num_tokens,
            expires_s=now_s + self._config.answer_max_age_s,
            miss_reason=self._metrics.tokens.lookup_ended(
                reply, hit_tokens != reply.hit_length, now_s - state.asked_s
            ),
        )
        state.asked_s = None
        state.saved_tokens = max(state.saved_tokens, state.answer.hit_tokens)
        return state.answer

    def _believable(self, hit_tokens: int, num_tokens: int) -> int:
        """Return the hit, or 0 for one that no lookup of ``num_tokens`` tokens can have."""
        if 0 <= hit_tokens < num_tokens and hit_tokens % self._alignment == 0:
            return hit_tokens
        self.counts["answers_refused"] += 1
        logger.warning("lookup answered %d of %d tokens; refused", hit_tokens, num_tokens)
        return 0

    def _forget(self, request_id: str) -> None:
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._metrics.tokens.load_ended(state, failed_as="aborted")
            self._lookups.discard(request_id)
            if not self._requests:
                self._worth.note_idle()

    # Reports

    def _prompt_tokens(self, output: SchedulerOutput) -> int:
        """Return how many tokens of prompts a step computes."""
        total = 0
        for request_id, num_computed in scheduled(output):
            state = self._requests.get(request_id)
            if state is not None:
                remaining = state.request.num_prompt_tokens - num_computed
                total += max(0, min(remaining, output.num_scheduled_tokens[request_id]))
        return total

    def _take_events_of_ranks(self, meta: KVXferWorkerMetadata) -> None:
        if self._pins is not None:
            self._pins.note_free(meta.blocks_free)
        if self._events is not None:
            self._events.lost(meta.lost)
            self._events.ended(meta.ended, meta.failed_saves)
        for request_id in meta.failed_loads:
            self.counts["loads_failed"] += 1
            state = self._requests.get(request_id)
            if state is not None:
                self._metrics.tokens.load_ended(state, failed_as="load_failed")
                state.load_failed = True
                state.saved_tokens = state.save_due_tokens = 0


def _tokens(offer: Offer) -> int:
    return offer.hit_tokens - offer.local_tokens
