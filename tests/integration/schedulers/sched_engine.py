# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: vLLM's scheduler, our connector on both sides, real store and channel.

Every step checks that what vLLM counts as computed lies in the cache.
"""

import threading
import time
import uuid
from collections import Counter, deque
from unittest import mock

import numpy as np
from sched_configs import BLOCK, LAYERS, kvxfer_transfer, make_cache_config, make_vllm_config
from sched_model import (
    DIGESTS,
    POISON,
    ModelRunner,
    continuation,
    kv_bytes,
    runner_output,
)
from sched_ranks import Clock, Rank
from sched_runners import RunnerV1, RunnerV2
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvxfer.connector import KVXferConnector
from kvxfer.messages import KVXferMetadata
from kvxfer.stores import Outcome, open_store

DEADLINE_S = 10


class Engine:
    """A scheduler of vLLM and the workers of its ranks, in one thread and one process."""

    def __init__(
        self,
        store_uri="",
        *,
        transfer=None,
        num_ranks=1,
        num_blocks=64,
        windowed=False,
        asynchronous=False,
        num_spec_tokens=0,
        runner=1,
        policy="recompute",
        role="kv_both",
        engine_id=None,
        dp_rank=0,
        max_batched_tokens=64,
        max_requests=8,
        **settings,
    ):
        self.num_ranks, self.num_blocks, self.windowed = num_ranks, num_blocks, windowed
        self.clock = Clock()
        transfer = transfer or kvxfer_transfer(store_uri, policy=policy, role=role, **settings)
        self.engine_id = engine_id or uuid.uuid4().hex
        self.config = make_vllm_config(
            {"engine_id": self.engine_id, **transfer},
            num_blocks=num_blocks,
            num_ranks=num_ranks,
            num_spec_tokens=num_spec_tokens,
            asynchronous=asynchronous,
            max_batched_tokens=max_batched_tokens,
            max_requests=max_requests,
            dp_rank=dp_rank,
        )
        self.cache_config = make_cache_config(num_blocks, num_ranks, windowed=windowed)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._asynchronous, self._num_spec_tokens = asynchronous, num_spec_tokens
        runner_cls = {1: RunnerV1, 2: RunnerV2}[runner]
        self.ranks = [Rank(self, rank, runner_cls) for rank in range(num_ranks)]
        self.vllm = self._make_scheduler(runner)
        self._hand_over_handshakes()
        self.model = ModelRunner(num_spec_tokens, windowed, asynchronous and num_spec_tokens > 0)
        self._aggregator = KVOutputAggregator.from_connector(self.vllm.connector, num_ranks)
        self._in_flight = deque()
        self.known = {}
        """Block hash -> the tokens that it closes, and what else their KV depends on."""
        self.requests = {}
        self.finished = {}
        self.generated = {}
        self.loads, self.saves, self.reported = [], [], Counter()
        self._owed = {}
        self.outputs = deque(maxlen=1000)

    def _make_scheduler(self, runner):
        cls = AsyncScheduler if self._asynchronous else Scheduler
        block, hash_block = resolve_kv_cache_block_sizes(self.cache_config, self.config)
        with mock.patch.object(VllmConfig, "use_v2_model_runner", property(lambda _: runner == 2)):
            return cls(
                vllm_config=self.config,
                kv_cache_config=self.cache_config,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=block,
                hash_block_size=hash_block,
                log_stats=True,
            )

    def _hand_over_handshakes(self):
        metadata = {(0, r.rank): r.connector.get_handshake_metadata() for r in self.ranks}
        self.vllm.connector.set_xfer_handshake_metadata_pp_aware(metadata)

    def close(self):
        for rank in self.ranks:
            rank.switches.mend()
        self.vllm.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()

    # Requests

    def add(self, name, tokens, *, max_tokens=4, salt=b"", params=None, **facts):
        """Hand a request to the scheduler; ``salt``: what else its KV depends on."""
        pooling = facts.pop("pooling_params", None)
        if pooling is None:
            params = params or SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, list(tokens), params, pooling, block_hasher=self._hasher, **facts)
        self.requests[name] = request
        self.model.salts[name] = salt
        self.generated[name] = []
        self.finished.pop(name, None)
        self.vllm.add_request(request)
        return request

    def abort(self, *names):
        self.vllm.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        for name in names:
            if name in self.requests:
                self.finished.setdefault(name, "abort")

    def is_in_flight(self, name):
        """Whether a step that computes for the name has not been taken yet, aborted or not."""
        return any(name in output.num_scheduled_tokens for output, _ in self._in_flight)

    # Steps

    def step(self):
        """Schedule and run one step; return the scheduler's output."""
        return self.perform(self.plan())

    def plan(self):
        """Schedule a step, which ``perform`` then runs."""
        output = self.vllm.schedule()
        self.outputs.append(output)
        self._note_orders(output)
        self._note_hashes()
        return output

    def perform(self, output):
        """Run a planned step on every rank, and take outputs as the scheduler's kind has it."""
        self._in_flight.append((output, self._execute(output)))
        in_flight = 1 if self._asynchronous and output.num_scheduled_tokens else 0
        while len(self._in_flight) > in_flight:
            self._take_outputs()
        return output

    def drain(self):
        """Take the outputs of every step in flight."""
        while self._in_flight:
            self._take_outputs()

    def _take_outputs(self):
        output, result = self._in_flight.popleft()
        self._note_reports(result.kv_connector_output)
        by_client = self.vllm.update_from_output(output, result)
        for out in (out for outputs in by_client.values() for out in outputs.outputs):
            self.generated[out.request_id] += out.new_token_ids
            if out.finish_reason is not None:
                self.finished[out.request_id] = str(out.finish_reason)
        if self._num_spec_tokens and not self._asynchronous:
            names, drafts = self.model.last_drafts
            self.vllm.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _execute(self, output):
        work, sampled = self.model.begin(output)
        results = []
        for rank in self.ranks:
            self._poison_load_targets(rank)

            def forward(rank=rank):
                # vLLM shares a block in the very step that computes it: layers write, then read.
                self.model.forward(rank.caches, rank.heads, work)
                self.model.check(rank.caches, rank.heads, work)

            results.append(runner_output(sampled, rank.runner.run(output, forward)))
        return self._aggregator.aggregate(results)

    def _note_orders(self, output):
        metadata = output.kv_connector_metadata
        every = getattr(metadata, "metadata", (metadata,))
        self._step_loads = []
        for child, ours in enumerate(m for m in every if isinstance(m, KVXferMetadata)):
            self._step_loads += ours.loads
            self.saves += ours.saves
            for job in (*ours.saves, *ours.loads):
                if getattr(job, "is_whole", True):
                    self._owed |= {(child, kind, job.job_id): 1 for kind in ("free", "ended")}
        self.loads += self._step_loads

    def _note_hashes(self):
        for name, request in self.requests.items():
            tokens, salt = request._all_token_ids, self.model.salts[name]
            for idx in range(len(request.block_hashes)):
                block_hash = bytes(request.block_hashes[idx])
                if block_hash not in self.known:
                    self.known[block_hash] = (tuple(tokens[: (idx + 1) * BLOCK]), salt)

    def _note_reports(self, reported):
        if reported is not None:
            self.reported.update(("received", n) for n in reported.finished_recving or ())
            self.reported.update(("failed", n) for n in reported.failed_recving or ())
            self.reported.update(("bad block", b) for b in reported.invalid_block_ids or ())

    def _poison_load_targets(self, rank):
        """What a load does not write must not look as if it had been."""
        for load in self._step_loads:
            for chunks in load.chunks:
                for cache in rank.caches.values():
                    cache.numpy()[chunks.block_ids] = POISON

    def until(self, condition, *, step=True):
        """Run steps until ``condition()``; fails when nothing happens for long."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "nothing happened"
            if step:
                self.step()
            threading.Event().wait(0.0005)

    def run(self, *names):
        """Run until these requests have finished."""
        self.until(lambda: all(name in self.finished for name in names))

    def serve(self, name, tokens, **facts):
        """Run one request to its end and everything that it has left behind."""
        request = self.add(name, tokens, **facts)
        self.run(name)
        self.settle()
        return request

    def settle(self):
        """Step until vLLM would stop stepping, no job is alive, and everything is reported."""
        self.until(self._is_quiet)
        self.step()
        self.drain()

    def _is_quiet(self):
        return (
            not self._in_flight
            and not self.num_live_jobs
            and not self.vllm.has_requests()
            and not self.vllm.finished_req_ids
        )

    # What can be asked

    @property
    def schedulers(self):
        """Our scheduler sides."""
        connector = self.vllm.connector
        children = getattr(connector, "sub_connectors", [connector])
        return [c._scheduler_side for c in children if isinstance(c, KVXferConnector)]

    @property
    def ours(self):
        """Our only scheduler side."""
        (side,) = self.schedulers
        return side

    @property
    def num_live_jobs(self):
        return sum(rank.num_live_jobs for rank in self.ranks)

    @property
    def pool(self):
        return self.vllm.kv_cache_manager.block_pool

    def loaded(self, name):
        """Return (from token, to token) of each load that was ordered for a request."""
        return [(x.local_tokens, x.hit_tokens) for x in self.loads if x.request_id == name]

    def saved_blocks(self, name):
        """Return the hashes of the chunks of group 0 that were ordered to be saved, in order."""
        own = {bytes(block_hash) for block_hash in self.requests[name].block_hashes}
        return [
            block_hash
            for save in self.saves
            for chunks in save.chunks
            if chunks.group == 0
            for block_hash in chunks.by_hash()
            if block_hash in own
        ]

    def assert_generated(self, name):
        """The request's tokens are what the model makes of its prompt."""
        request, made = self.requests[name], self.generated[name]
        prompt, salt = request.prompt_token_ids, self.model.salts[name]
        assert made == continuation(prompt, len(made), salt)

    def assert_empty(self):
        """Nothing is left of any request, on either side."""
        assert self.pool.get_num_free_blocks() == self.num_blocks - 1
        assert self.vllm.requests == {}
        for side in self.schedulers:
            assert side.num_requests == 0
            assert not side.has_pending_push_work()
            assert side._loads == []
            assert side._lookups.num_open == side._lookups.num_in_flight == 0
        assert self.num_live_jobs == 0
        for rank in self.ranks:
            for worker in rank.workers:
                assert worker._loads == {}
                assert worker._events.bad_blocks == worker._events.failed_loads == set()
                assert worker._loader._valid_chunks == {}
        self.assert_reported_once()

    def assert_reported_once(self):
        """Every job that was ordered was reported, once on every rank and in each way it owes."""
        for rank in self.ranks:
            assert dict(rank.reports) == self._owed

    def assert_store_is_true(self, store_uri):
        """Every value in the store holds what its key says; return how many there are."""
        held = {
            space.prefix: (rank, space)
            for rank in self.ranks
            for worker in rank.workers
            for spaces in worker._spaces.held.values()
            for space in spaces
        }
        store = open_store(store_uri)
        try:
            return sum(self._check_values(store, *each) for each in held.values())
        finally:
            store.close()

    def _check_values(self, store, rank, space):
        num_values = 0
        for block_hash, (tokens, salt) in self.known.items():
            (key,) = space.keys(block_hash, len(block_hash), np.zeros(1, np.int32))
            value = bytearray(space.value_bytes)
            if store.get_into([key], [memoryview(value)]) != [Outcome.OK]:
                continue
            num_values += 1
            layers = [space.group] if self.windowed else range(len(LAYERS))
            digests = DIGESTS.of(tokens, salt)[-BLOCK:]
            wanted = [
                kv_bytes(digests, layer, rank.heads, self.model.weights).swapaxes(0, 1)
                for layer in layers
            ]
            assert bytes(value) == b"".join(part.tobytes() for part in wanted)
        return num_values
