# SPDX-License-Identifier: Apache-2.0
"""The workers of an engine without a model, all in one process."""

import time
from collections import Counter
from contextlib import ExitStack
from unittest import mock

from sched_model import heads_of, make_caches
from sched_store import SwitchedStore, Switches
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvxfer.connector import KVXferConnector
from kvxfer.stores import open_store
from kvxfer.transfer import Reports
from kvxfer.vllm_specs.ranks import RankPlace


class Clock:
    """The clock of every job's deadline; a test may let time pass."""

    def __init__(self):
        self._ahead_s = 0.0

    def __call__(self):
        return time.monotonic() + self._ahead_s

    def skip(self, seconds):
        self._ahead_s += seconds


class Rank:
    """One worker: its connector, its caches, and what a test may do to it."""

    def __init__(self, engine, rank, runner_cls):
        self.rank, self.switches = rank, Switches()
        self.heads = heads_of(rank, engine.num_ranks)
        self.caches = make_caches(engine.num_blocks, len(self.heads), engine.windowed)
        with ExitStack() as stack:
            for name, value in self._surroundings().items():
                stack.enter_context(mock.patch(f"kvxfer.worker.{name}", value))
            self.connector = KVConnectorFactory.create_connector(
                engine.config, KVConnectorRole.WORKER, engine.cache_config
            )
        self.runner = runner_cls(engine.config, self.connector, self.caches)
        self.reports = Counter()
        self._held = False
        for child, worker in enumerate(self.workers):
            self._watch(child, worker)
            worker._board._clock = engine.clock

    def _surroundings(self):
        return {
            "place_of_this_rank": lambda vllm_config: RankPlace(tp_rank=self.rank),
            "open_store": lambda uri: SwitchedStore(open_store(uri), self.switches),
        }

    @property
    def workers(self):
        """Our worker sides on this rank: one, or one per child of a MultiConnector."""
        children = getattr(self.connector, "sub_connectors", [self.connector])
        return [c._worker_side for c in children if isinstance(c, KVXferConnector)]

    def _watch(self, child, worker):
        """Count every report of a job, and let a test hold them back."""
        board = worker._board
        take = board.take_reports

        def take_reports():
            if self._held:
                return Reports()
            reports = take()
            self.reports.update((child, "free", job) for job in reports.blocks_free)
            self.reports.update((child, "ended", job) for job in reports.ended)
            return reports

        board.take_reports = take_reports

    def hold_reports(self):
        self._held = True

    def release_reports(self):
        self._held = False

    @property
    def num_live_jobs(self):
        return sum(worker._board.num_live for worker in self.workers)
