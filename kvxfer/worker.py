# SPDX-License-Identifier: Apache-2.0
"""Worker side: registers the KV cache, runs the jobs that the scheduler side orders, reports.

Calls, in vLLM's order:

    register_kv_caches                once: layout, keys, staging, threads, lookup server
    start_load_kv, wait_for_save      each step: take the step's loads and saves; neither waits
    get_transfer_results, ...         each step: report what has happened since
    shutdown                          once: finish what can be finished in time, close everything
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvxfer.blocks import BlockLayout, StagingPool
from kvxfer.blocks.cuda_calibration import calibrate
from kvxfer.blocks.cuda_mover import CudaMover
from kvxfer.blocks.cuda_queues import TorchQueues
from kvxfer.blocks.movers import HostMover, Mover
from kvxfer.config import KVXferConfig
from kvxfer.errors import ConfigError
from kvxfer.keys import KeySpace
from kvxfer.lookup import Endpoint, LookupServer, PackedHashes
from kvxfer.lookup.key_spaces import KeySpacesPayload
from kvxfer.lookup.presence import StorePresence
from kvxfer.messages import KVXferHandshake, KVXferMetadata, KVXferWorkerMetadata
from kvxfer.observe.events import are_wanted
from kvxfer.observe.lost_blocks import LostBlocks
from kvxfer.observe.stats import KVXferStats
from kvxfer.observe.worker_metrics import WorkerMetrics, name_source
from kvxfer.spaces import RankSpaces
from kvxfer.stores import Store, open_store
from kvxfer.stores.checksums import ChecksummedStore
from kvxfer.transfer import JobBoard, JobResult, Loader, LoadSpec, Route, Saver
from kvxfer.transfer.direct import DirectBlocks, direct_blocks
from kvxfer.transfer.pieces import VALUE_ALIGN
from kvxfer.vllm_specs import (
    EngineFacts,
    ValueNames,
    check_version,
    content_format,
    name_values,
    place_of_this_rank,
    read_config,
    read_engine,
    regions,
)

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096

NameValues = Callable[[str], ValueNames]
"""Value order as resolved -> the engine's parts of a key."""


@dataclass(slots=True)
class _Events:
    """Reports gathered since the last step's end."""

    blocks_free: Counter[int] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)
    failed_loads: set[str] = field(default_factory=set)
    failed_saves: set[int] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


class KVXferWorker:
    """Moves blocks between the registered KV cache and the store, on one rank.

    Lives in the worker's thread; owns the staging memory, the transfer threads and the server of
    its rank, which answers lookups on rank 0 and resets on all. The store is the caller's until
    ``shutdown``, which closes it. A step never waits here: loads and saves are handed to
    threads, and what they did is reported by later steps, each job once.
    """

    def __init__(
        self, config: KVXferConfig, facts: EngineFacts, store: Store, name_values: NameValues
    ) -> None:
        self._config, self._facts = config, facts
        source = name_source(facts.engine_id, facts.rank)
        self._metrics = WorkerMetrics(store, source, tells_of_store=facts.rank == 0)
        self._store: Store = self._metrics.store
        self._name_values = name_values
        self._board = JobBoard(on_end=self._count_job)
        self._loads: dict[int, LoadSpec] = {}
        self._refused: list[LoadSpec] = []
        self._events = _Events()
        self._lost = LostBlocks()
        self._saver: Saver | None = None
        self._loader: Loader | None = None
        self._staging: StagingPool | None = None
        self._mover: Mover | None = None
        self._counts_at_end: dict[str, int] = {}
        self._owed: KVXferMetadata | None = None
        self._server: LookupServer | None = None

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVXferWorker:
        """Make the worker side of this process's rank; opens the store."""
        check_version(vllm.__version__)
        config = read_config(vllm_config)
        facts = read_engine(vllm_config, kv_cache_config, config, place_of_this_rank(vllm_config))

        def names(value_order: str) -> ValueNames:
            layers = [name for layer_set in facts.layer_sets for name in layer_set.layers]
            content = content_format(vllm_config, layers)
            return name_values(
                vllm_config, facts, config, value_order=value_order, content_format=content
            )

        store = open_store(config.store)
        worker = cls(config, facts, ChecksummedStore(store) if config.checksums else store, names)
        if are_wanted(vllm_config):
            worker.watch_lost_blocks()
        return worker

    def watch_lost_blocks(self) -> None:
        """Report blocks of which this rank sees a value go, or gone, for KV events."""
        self._metrics.store.watch_losses(self._lost.note)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Make everything that depends on the tensors; raises what start-up must refuse."""
        config, facts = self._config, self._facts
        layout = BlockLayout.from_regions(
            regions(facts, kv_caches),
            value_order=config.value_order,
            head_shard={i: s.heads_per_shard for i, s in enumerate(facts.layer_sets)},
            num_blocks=facts.num_blocks,
        )
        names = self._name_values(layout.value_order)
        self._coordinator = facts.coordinator()
        self._spaces = RankSpaces(config.cache_prefix, facts, names, layout)
        self._lost.know(self._spaces.held.values())
        self._staging = self._make_staging(layout)
        self._mover = self._make_mover(layout, self._staging)
        direct = direct_blocks(layout, self._store)
        self._saver = Saver(
            self._board,
            self._route(self._spaces.saved, direct),
            num_threads=config.num_save_threads,
            max_queued=config.max_queued_saves,
            timeout_s=config.save_timeout_s,
        )
        self._loader = Loader(
            self._board,
            self._route(self._spaces.held, direct),
            num_threads=config.num_load_threads,
            max_queued=config.max_queued_loads,
            timeout_s=config.load_timeout_s,
        )
        self._saver.on_staging_wait = self._metrics.note_staging_wait
        self._loader.on_staging_wait = self._metrics.note_staging_wait
        self._server = self._make_server()
        logger.info(
            "kvxfer: %d bytes a chunk on this rank, keys start with %s",
            sum(c.value_bytes for c in layout.classes),
            self._spaces.reset_prefix.decode(),
        )

    def get_handshake_metadata(self) -> KVXferHandshake | None:
        """Return what other ranks need to know of this one; None before registration."""
        if self._server is None:
            return None
        return KVXferHandshake(
            endpoint=str(self._server.endpoint.path),
            host=socket.gethostname(),
            key_prefixes=tuple(
                (space.group, space.prefix)
                for spaces in self._spaces.held.values()
                for space in spaces
            ),
        )

    # Steps

    def begin_step(self, metadata: KVXferMetadata) -> None:
        """Take the step's orders before its forward pass.

        With some drafters vLLM leaves out ``wait_for_save`` on all pipeline stages but the last.
        Saves that it was not called for begin here, one step late: their blocks are pinned.
        """
        if self._owed is not None:
            self.wait_for_save(self._owed)
        self._owed = metadata if metadata.saves else None

    def start_load_kv(self, metadata: KVXferMetadata) -> None:
        """Hand this step's loads to the load threads.

        Their blocks may be those of requests that a forward pass still writes: it comes first.
        """
        after = self._mark() if metadata.loads else None
        for spec in metadata.loads:
            assert self._loader is not None, "register_kv_caches comes first"
            if not spec.is_whole:
                self._refused.append(spec)
                continue
            self._loads[spec.job_id] = spec
            self._loader.submit(spec, after)

    def wait_for_save(self, metadata: KVXferMetadata) -> None:
        """Hand this step's saves to the save threads, behind the forward pass that was queued."""
        self._owed = None
        after = self._mark() if metadata.saves else None
        for spec in metadata.saves:
            assert self._saver is not None, "register_kv_caches comes first"
            self._saver.submit(spec, after)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Return the requests whose load has ended on this rank since the last call.

        With one full-attention group a failed load is told by its blocks, which keeps the valid
        prefix (``get_block_ids_with_load_errors``); otherwise by ``failed_recving``.
        """
        results = KVConnectorTransferResults()
        refused, self._refused = self._refused, []
        for unloadable in refused:
            results.finished_recving.add(unloadable.request_id)
            results.failed_recving.add(unloadable.request_id)
            self._events.failed_loads.add(unloadable.request_id)
        reports = self._board.take_reports()
        self._events.blocks_free.update(reports.blocks_free)
        for job_id, result in reports.ended.items():
            spec = self._loads.pop(job_id, None)
            if spec is None:
                self._events.ended[job_id] += 1
                if result is not JobResult.DONE:
                    self._events.failed_saves.add(job_id)
                continue
            results.finished_recving.add(spec.request_id)
            self._note_load(spec, results)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return and forget the blocks that loads reported so far left unwritten."""
        bad, self._events.bad_blocks = self._events.bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> KVXferWorkerMetadata | None:
        """Return and forget the events for the scheduler side; None if there are none."""
        events, lost = self._events, self._lost.take()
        if not (events.blocks_free or events.ended or events.failed_loads or lost):
            return None
        self._events = _Events(bad_blocks=events.bad_blocks)
        return KVXferWorkerMetadata(
            dict(events.blocks_free),
            dict(events.ended),
            frozenset(events.failed_loads),
            frozenset(events.failed_saves),
            lost,
        )

    def take_stats(self) -> KVXferStats | None:
        """Return what this rank has counted since the last call; None if nothing."""
        if self._saver is None or self._loader is None:
            return None
        queued = {"save": self._saver.num_queued, "load": self._loader.num_queued}
        return self._metrics.take(queued)

    def counts(self) -> dict[str, int]:
        """Return counters by name: values, bytes, and jobs that did not end as done."""
        total = Counter(self._counts_at_end)
        for side, transfer in (("save", self._saver), ("load", self._loader)):
            if transfer is not None:
                total.update({f"{side}_{name}": n for name, n in transfer.counts.items()})
        return dict(total)

    def shutdown(self) -> None:
        """Finish queued saves within ``close_timeout_s``, then close everything; idempotent."""
        if self._server is not None:
            self._server.close()
        if self._saver is not None:
            self._saver.close(self._config.close_timeout_s)
        if self._loader is not None:
            self._loader.close(self._config.close_timeout_s)
        if self._staging is not None:
            self._staging.close()
        self._let_go_of_tensors()
        self._store.close()

    # Lookup server

    def lookup(self, num_tokens: int, hashes: PackedHashes) -> tuple[int, list[tuple[int, int]]]:
        """Return hit length and tail boundaries of a prompt; runs in the lookup thread."""
        if not self._spaces.all_shards:
            return 0, []  # the other stages are not known yet
        presence = StorePresence(self._store, self._spaces.all_shards, hashes)
        answer = self._coordinator.lookup(num_tokens, hashes, presence.exists)
        return answer.hit_length, list(answer.tail_boundaries)

    def set_key_spaces(self, payload: bytes) -> None:
        """Take what the scheduler side knows of all ranks; runs in the lookup thread."""
        told = KeySpacesPayload.decode(payload)
        self._coordinator = self._facts.coordinator(told.eagle_groups)
        if told.key_prefixes:  # else nobody knows more than this rank does
            self._spaces.set_all_shards(told.key_prefixes)
            self._lost.know(self._spaces.all_shards.values())

    def reset(self, epoch: int, remove: bool, timeout_s: float) -> bool:
        """Drop saves ordered before ``epoch``; then, with ``remove``, remove the model's keys."""
        assert self._saver is not None
        if not self._saver.drain(epoch, timeout_s):
            return False
        if remove:
            num_removed = self._store.remove_prefix(self._spaces.reset_prefix)
            logger.info("kvxfer reset: %d values removed", num_removed)
        return True

    # Start-up and reports, in parts

    def _make_staging(self, layout: BlockLayout) -> StagingPool:
        """Cut the staging memory into a slot per thread and one to spare."""
        config = self._config
        num_slots = config.num_load_threads + config.num_save_threads + 1
        slot_bytes = config.staging_bytes // num_slots // PAGE_BYTES * PAGE_BYTES
        largest = max(c.value_bytes for c in layout.classes)
        if slot_bytes < largest + VALUE_ALIGN:
            needed = (largest + VALUE_ALIGN + PAGE_BYTES) * num_slots
            raise ConfigError(
                f"staging_bytes is {config.staging_bytes}: {num_slots} slots of {slot_bytes} bytes "
                f"cannot hold a value of {largest}; set it to {needed} or more"
            )
        staging = StagingPool(num_slots, slot_bytes)
        self._store.register(staging.buffer)
        return staging

    def _make_mover(self, layout: BlockLayout, staging: StagingPool) -> Mover:
        """Return what copies between the blocks and the staging memory, wherever the blocks are."""
        if layout.device == "cpu":
            return HostMover(layout)
        mover = CudaMover(
            TorchQueues(layout),
            staging,
            num_pack_lanes=self._config.num_save_threads,
            num_unpack_lanes=self._config.num_load_threads,
            device_bytes=self._config.device_staging_bytes,
        )
        calibrate(mover, layout, staging)
        return mover

    def _mark(self) -> Any:
        """Return where the engine's queue stands now."""
        assert self._mover is not None, "register_kv_caches comes first"
        return self._mover.mark()

    def _route(self, spaces: Mapping[int, list[KeySpace]], direct: DirectBlocks | None) -> Route:
        assert self._staging is not None
        assert self._mover is not None
        return Route(self._store, self._mover, self._staging, spaces, direct)

    def _make_server(self) -> LookupServer:
        facts = self._facts
        endpoint = Endpoint.for_engine(facts.engine_id, facts.dp_rank, rank=facts.rank)
        return LookupServer(
            endpoint,
            self.lookup,
            self.reset,
            self.set_key_spaces,
            max_queued=self._config.max_lookups_in_flight,
            close_timeout_s=self._config.close_timeout_s,
        )

    def _let_go_of_tensors(self) -> None:
        """Drop what keeps vLLM's KV cache allocated; counters stay.

        Memory stays pinned where a thread was abandoned: it may come back to it.
        """
        transfers = [each for each in (self._saver, self._loader) if each is not None]
        if self._mover is not None and not any(each.num_abandoned for each in transfers):
            self._mover.close()
        self._counts_at_end = self.counts()
        self._mover = self._saver = self._loader = self._staging = None

    def _count_job(self, job_id: int, result: JobResult, seconds: float) -> None:
        """Count a job that has ended; a load is in ``_loads`` until it is reported."""
        self._metrics.note_job("load" if job_id in self._loads else "save", result, seconds)

    def _note_load(self, spec: LoadSpec, results: KVConnectorTransferResults) -> None:
        """Report what an ended load left unwritten: nothing, unless it failed."""
        assert self._loader is not None
        num_valid = self._loader.take_valid_chunks(spec.job_id)
        if num_valid == sum(map(len, spec.chunks)):
            return
        self._events.failed_loads.add(spec.request_id)
        if not self._facts.keeps_valid_prefix:
            results.failed_recving.add(spec.request_id)
            return
        for chunks in spec.chunks:
            self._events.bad_blocks.update(chunks.block_ids[num_valid:].tolist())
