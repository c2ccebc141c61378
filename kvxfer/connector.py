# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM loads by ``kv_connector_module_path``; it forwards by role and no more.

    --kv-transfer-config '{"kv_connector": "KVXferConnector",
                           "kv_connector_module_path": "kvxfer.connector",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

vLLM makes one object in the scheduler's process (``KVXferScheduler`` does the work) and one in
every worker (``KVXferWorker``). Importing this module starts nothing and needs no device.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvxfer.messages import KVXferHandshake, KVXferMetadata
from kvxfer.observe.logs import join_vllm_logging
from kvxfer.observe.prometheus import KVXferPromMetrics
from kvxfer.observe.stats import KVXferStats
from kvxfer.scheduler import KVXferScheduler
from kvxfer.worker import KVXferWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class KVXferConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's connector interface over the scheduler side or the worker side, by role."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        join_vllm_logging()
        vllm_config = _with_own_engine_id(vllm_config)
        self._scheduler_side: KVXferScheduler | None = None
        self._worker_side: KVXferWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler_side = KVXferScheduler.from_vllm(vllm_config, kv_cache_config)
        else:
            self._worker_side = KVXferWorker.from_vllm(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is lost costs a later miss, nothing that a request waits for."""
        return False

    @property
    def supports_sleep_mode(self) -> bool:
        """False: sleep would free memory that transfers use; vLLM then refuses to sleep."""
        return False

    def shutdown(self) -> None:
        """Close whichever side this object is; idempotent."""
        if self._scheduler_side is not None:
            self._scheduler_side.shutdown()
        if self._worker_side is not None:
            self._worker_side.shutdown()

    # Scheduler side

    @property
    def _scheduler(self) -> KVXferScheduler:
        assert self._scheduler_side is not None, "a scheduler call on the worker's connector"
        return self._scheduler_side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Forward; see ``KVXferScheduler``."""
        self._scheduler.bind_kv_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Forward; see ``KVXferScheduler``."""
        self._scheduler.bind_gpu_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take what every rank said of itself, by rank."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): m for rank, m in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take what every rank said of itself, by (pipeline stage, rank)."""
        known = {at: m for at, m in metadata.items() if isinstance(m, KVXferHandshake)}
        self._scheduler.set_handshakes([known[at] for at in sorted(known)])

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Forward; see ``KVXferScheduler``."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Forward; see ``KVXferScheduler``."""
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Forward; see ``KVXferScheduler``."""
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Forward; see ``KVXferScheduler``."""
        self._scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forward; see ``KVXferScheduler``."""
        return self._scheduler.request_finished(request), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forward; see ``KVXferScheduler``."""
        return self._scheduler.request_finished(request), None

    def register_finished_partial_tail(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """Forward; see ``KVXferScheduler``."""
        return self._scheduler.register_finished_partial_tail(
            request, block_ids, partial_tail_offloads
        )

    def has_pending_push_work(self) -> bool:
        """Forward; see ``KVXferScheduler``."""
        return self._scheduler.has_pending_push_work()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Forward; see ``KVXferScheduler``."""
        return self._scheduler.take_events()

    def reset_cache(self) -> bool | None:
        """Remove what this model stored under our prefix; None on the worker side."""
        return None if self._scheduler_side is None else self._scheduler_side.reset()

    # Worker side

    @property
    def _worker(self) -> KVXferWorker:
        assert self._worker_side is not None, "a worker call on the scheduler's connector"
        return self._worker_side

    @property
    def _step(self) -> KVXferMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVXferMetadata)
        return metadata

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Forward; see ``KVXferWorker``."""
        self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Forward; see ``KVXferWorker``."""
        return self._worker.get_handshake_metadata()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's orders; see ``KVXferWorker.begin_step``."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(self._step)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Forward; see ``KVXferWorker``."""
        self._worker.start_load_kv(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled after its load has ended."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing to do by layer: whole blocks are saved after the forward pass."""

    def wait_for_save(self) -> None:
        """Forward; see ``KVXferWorker``."""
        self._worker.wait_for_save(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Forward; see ``KVXferWorker``."""
        return self._worker.get_transfer_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Forward; see ``KVXferWorker``."""
        return self._worker.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Forward; see ``KVXferWorker``."""
        return self._worker.build_connector_worker_meta()

    # Metrics

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what this side has counted since the last step; None if nothing."""
        side = self._worker_side if self._scheduler_side is None else self._scheduler_side
        assert side is not None
        return side.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Return stats of what a step sent, for vLLM's log; they grow apart from ``data``."""
        return KVXferStats(data).copy()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Return the frontend's collectors."""
        return KVXferPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _register() -> None:
    """Make the class known by its name to vLLM's factory.

    The log of a ``MultiConnector`` asks for the classes of its children by name alone, without
    their module paths, and raises in the frontend's output loop for one that was not registered.
    """
    name = KVXferConnector.__name__
    try:
        KVConnectorFactory.register_connector(name, KVXferConnector.__module__, name)
    except ValueError as error:  # another module of the name came first
        logger.debug("vLLM keeps another connector: %s", error)


_register()


def _with_own_engine_id(vllm_config: VllmConfig) -> VllmConfig:
    """Return the configuration with an engine id that no other connector of the engine has.

    The children of vLLM's MultiConnector share one id, yet each has a lookup channel of its own.
    What tells them apart is what they store where; the same on all ranks and on both sides.
    """
    transfer = copy.copy(vllm_config.kv_transfer_config)
    assert transfer is not None
    settings = repr(sorted(transfer.kv_connector_extra_config.items()))
    transfer.engine_id = f"{transfer.engine_id}/{hashlib.sha256(settings.encode()).hexdigest()}"
    own = copy.copy(vllm_config)
    own.kv_transfer_config = transfer
    return own
