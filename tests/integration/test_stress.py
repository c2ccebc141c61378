# SPDX-License-Identifier: Apache-2.0
"""Everything that threads share, used by many of them at once, every result checked.

One coordinator, one layout, one staging pool, one job board, one LMDB store with evictions, one
lookup server. ``KVXFER_STRESS_SECONDS`` sets how long; ``make test-sanitize`` runs it under the
sanitizers. Needs neither vLLM nor torch.
"""

import itertools
import logging
import os
import queue
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvxfer.blocks import ITEM_DTYPE, BlockLayout, StagingPool, gather_items, scatter_items
from kvxfer.hits import CacheGroup, Coordinator
from kvxfer.keys import KeySpace
from kvxfer.lookup import Endpoint, LookupClient, LookupServer, PackedHashes
from kvxfer.lookup.protocol import Status
from kvxfer.stores import Outcome, open_store
from kvxfer.transfer import JobBoard, JobResult

SECONDS = float(os.environ.get("KVXFER_STRESS_SECONDS", "5"))
WAIT_S = 30
NUM_THREADS = 3
"""Of each kind."""


class Crew:
    """Threads that repeat their acts until the time is over, or until one of them fails."""

    def __init__(self):
        self.rounds = Counter()
        self.errors = []
        self._threads = []
        self._over = threading.Event()

    def add(self, act, number=0):
        """Have a thread call ``act(number, random)`` again and again."""
        thread = threading.Thread(
            target=self._repeat, args=(act, number), name=f"{act.__name__}-{number}", daemon=True
        )
        self._threads.append(thread)

    def run(self, seconds):
        for thread in self._threads:
            thread.start()
        self._over.wait(seconds)
        self._over.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        assert not stuck, f"never came back: {stuck}"
        if self.errors:
            raise self.errors[0]
        idle = [thread.name for thread in self._threads if not self.rounds[thread.name]]
        assert not idle, f"did nothing in {seconds} s: {idle}"

    def _repeat(self, act, number):
        name, rng = threading.current_thread().name, random.Random(f"{act.__name__}{number}")
        try:
            while not self._over.is_set():
                act(number, rng)
                self.rounds[name] += 1
        except BaseException as error:  # noqa: BLE001  # run raises it
            self.errors.append(error)
            self._over.set()


class Hits:
    """One coordinator; presence is a number of leading blocks, so that answers are known."""

    GROUPS = (
        CacheGroup("full", 16, spec_id="f"),
        CacheGroup("sliding_window", 16, window_tokens=64, spec_id="s"),
    )
    CASES = [(tokens, stored) for tokens in (17, 160, 4000, 33_000) for stored in (0, 3, 200, 9999)]

    def __init__(self):
        self.coordinator = self.make()
        self.expected = {case: self.answer(self.make(), *case) for case in self.CASES}

    def make(self):
        return Coordinator(
            self.GROUPS, hash_tokens=16, block_tokens=16, partial_hits=False, use_eagle=False
        )

    def answer(self, coordinator, num_tokens, num_stored):
        hashes = PackedHashes(bytes(32 * (num_tokens // 16)), 32)
        answer = coordinator.lookup(
            num_tokens,
            hashes,
            lambda queries: [(idx < num_stored).astype(np.uint8) for _, idx in queries],
        )
        return answer.hit_length, [np.array(mask).tolist() for mask in answer.load_masks]

    def look_up(self, number, rng):
        case = rng.choice(self.CASES)
        assert self.answer(self.coordinator, *case) == self.expected[case]
        assert self.expected[case][0] <= 16 * case[1]


class Copies:
    """One layout: blocks that only gathers read, and blocks of its own for each that scatters."""

    NUM_STILL, NUM_OWN = 32, 16

    def __init__(self):
        rng = np.random.default_rng(0)
        num_blocks = self.NUM_STILL + self.NUM_OWN * NUM_THREADS
        self.tensors = [rng.integers(0, 256, (num_blocks, 3000), np.uint8) for _ in range(3)]
        self.layout = BlockLayout.from_tensors(self.tensors)
        self.value_bytes = self.layout.classes[0].value_bytes
        self.still = self.gathered(np.arange(self.NUM_STILL))

    def items(self, ids, rows):
        items = np.zeros(len(ids), ITEM_DTYPE)
        items["block_id"] = ids
        items["value_ptr"] = rows.ctypes.data + np.arange(len(ids)) * self.value_bytes
        return items

    def gathered(self, ids):
        rows = np.full((len(ids), self.value_bytes), 0xA5, np.uint8)
        gather_items(self.layout, self.items(ids, rows))
        return rows

    def gather(self, number, rng):
        ids = np.array([rng.randrange(self.NUM_STILL) for _ in range(rng.randrange(1, 40))])
        assert np.array_equal(self.gathered(ids), self.still[ids])

    def scatter(self, number, rng):
        first = self.NUM_STILL + number * self.NUM_OWN
        ids = np.array(rng.sample(range(first, first + self.NUM_OWN), rng.randrange(1, 16)))
        rows = self.still[[rng.randrange(self.NUM_STILL) for _ in ids]].copy()
        scatter_items(self.layout, self.items(ids, rows))
        assert np.array_equal(self.gathered(ids), rows)


class Staging:
    """One pool; a slot's bytes are its holder's alone, whoever releases it."""

    def __init__(self):
        self.pool = StagingPool(4, 8192)
        self.late = queue.Queue()

    def lend(self, number, rng):
        slot = self.pool.acquire(0.05)
        if slot is None:
            return
        mark = rng.randrange(256)
        slot.buffer[:] = bytes([mark]) * 8192
        is_late = rng.random() < 0.2 and self.pool.quarantine(slot)
        assert slot.buffer[:] == bytes([mark]) * 8192
        if is_late:
            self.late.put(slot)
        else:
            slot.release()
            slot.release()

    def come_back_late(self, number, rng):
        try:
            slot = self.late.get(timeout=0.02)
        except queue.Empty:
            return
        slot.release()

    def check(self):
        while not self.late.empty():
            self.late.get().release()
        assert (self.pool.num_free, self.pool.num_quarantined) == (4, 0)
        self.pool.close()


class Jobs:
    """One board; every job is reported as free and as ended exactly once."""

    def __init__(self):
        self.board = JobBoard()
        self.ids = itertools.count()
        self.num_submitted, self.free, self.ended = Counter(), Counter(), Counter()
        self.lock = threading.Lock()

    def work(self, number, rng):
        job = self.board.submit(next(self.ids), rng.choice([0.0, 0.001, 5.0]))
        self.num_submitted[number] += 1
        if self.board.start(job):
            for last in (False, True):
                if self.board.begin_copy(job):
                    self.board.end_copy(job, last=last)
            self.board.end(job, rng.choice([JobResult.DONE, JobResult.FAILED]))
        assert self.board.end(job, JobResult.DONE) is False

    def report(self, number, rng):
        reports = self.board.take_reports()
        with self.lock:
            self.free.update(reports.blocks_free)
            self.ended.update(reports.ended.keys())

    def check(self):
        self.report(0, None)
        assert self.board.num_live == 0
        total = self.num_submitted.total()
        assert len(self.free) == len(self.ended) == total
        assert set(self.free.values()) == set(self.ended.values()) == {1}


class Values:
    """One store that is too small: what is found in it is whole and right, or not there."""

    def __init__(self, folder):
        self.store = open_store(f"lmdb://{folder}/store?capacity=2MiB&lease_s=0.05&timeout_s=60")
        self.spaces = [KeySpace(0, b"kvx1/%d/" % number) for number in range(NUM_THREADS)]

    def batch(self, rng):
        space, first = rng.choice(self.spaces), rng.randrange(200)
        count = rng.randrange(1, 12)
        numbers = np.arange(first, first + count, dtype="<u8")
        keys = space.keys(numbers.tobytes(), 8, np.arange(count, dtype=np.int32))
        return keys, [bytes(key[-20:]) * rng.choice([300, 2000]) for key in keys]

    def put(self, number, rng):
        keys, values = self.batch(rng)
        outcomes = self.store.put_from(keys, [memoryview(value) for value in values])
        assert set(outcomes) <= {Outcome.OK, Outcome.EXISTS, Outcome.NO_SPACE}, outcomes

    def get(self, number, rng):
        keys, values = self.batch(rng)
        assert set(self.store.exists(keys)) <= {0, 1}
        targets = [bytearray(len(value)) for value in values]
        outcomes = self.store.get_into(keys, [memoryview(target) for target in targets])
        assert set(outcomes) <= {Outcome.OK, Outcome.MISSING, Outcome.WRONG_SIZE}, outcomes
        for outcome, target, value in zip(outcomes, targets, values, strict=True):
            assert target == (value if outcome is Outcome.OK else bytes(len(value)))

    def remove(self, number, rng):
        assert self.store.remove_prefix(rng.choice(self.spaces).prefix) >= 0
        time.sleep(0.02)  # for the others to fill it again

    def check(self):
        stats = self.store.stats()
        assert stats.used_bytes <= stats.capacity_bytes
        failed = {name: n for name, n in stats.counters.items() if name.endswith("failed")}
        assert failed == {}
        assert stats.counters["get_ok"] > 0
        assert stats.counters["evicted"] > 0
        self.store.close()


class Channel:
    """One server, a client a thread; the first byte of a hash says whether its block is stored."""

    def __init__(self, folder, hits):
        self.hits = hits
        self.endpoint = Endpoint.for_engine("stress", folder=folder)
        self.server = LookupServer(self.endpoint, self.on_lookup, lambda *_: True)
        self.clients = [LookupClient(self.endpoint, timeout_s=WAIT_S) for _ in range(NUM_THREADS)]
        assert all(client.ping(WAIT_S) for client in self.clients)
        self.names = itertools.count()

    def on_lookup(self, num_tokens, hashes):
        stored = np.frombuffer(hashes.buffer, np.uint8)[:: hashes.width]
        answer = self.hits.coordinator.lookup(
            num_tokens, hashes, lambda queries: [stored[idx] for _, idx in queries]
        )
        return answer.hit_length, list(answer.tail_boundaries)

    def ask(self, number, rng):
        """Ask for many prompts at once, forget one, and take the answers as they come."""
        client, open_questions = self.clients[number], {}
        for _ in range(8):
            num_hashes, num_stored = rng.randrange(1, 300), rng.randrange(300)
            hashes = [bytes([idx < num_stored]) * 32 for idx in range(num_hashes)]
            open_questions[f"{next(self.names)}"] = (hashes, min(num_hashes, num_stored) * 16)
        client.lookup(f"forgotten-{number}", 16, [bytes(32)])
        client.discard(f"forgotten-{number}")
        deadline_s = time.monotonic() + WAIT_S
        while open_questions:
            assert time.monotonic() < deadline_s
            for name, (hashes, hit) in list(open_questions.items()):
                answer = client.lookup(name, 16 * len(hashes) + 1, hashes)
                if answer is not None:
                    assert (answer.status, answer.hit_length) == (Status.OK, hit)
                    del open_questions[name]

    def check(self):
        assert (self.server.counters.failed, self.server.counters.malformed) == (0, 0)
        for client in self.clients:
            assert client.num_open == 0
            client.close()
        self.server.close()


@pytest.fixture
def _quick_switches():
    """Have the interpreter switch threads 25 times as often: more interleavings, less waiting."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    yield
    sys.setswitchinterval(usual_s)


@pytest.mark.usefixtures("_quick_switches")
@pytest.mark.timeout(SECONDS + 120)
def test_everything_that_threads_share_holds_under_load(tmp_path, capsys, caplog):
    caplog.set_level(logging.ERROR, logger="kvxfer")  # a line for each of many quarantines
    sockets = Path(tempfile.mkdtemp(prefix="kvx"))
    hits, copies, staging, jobs = Hits(), Copies(), Staging(), Jobs()
    values, channel = Values(tmp_path), Channel(sockets, hits)
    crew = Crew()
    for number in range(NUM_THREADS):
        for act in (hits.look_up, copies.gather, copies.scatter, staging.lend, jobs.work):
            crew.add(act, number)
        for act in (values.put, values.get, channel.ask):
            crew.add(act, number)
    for act in (staging.come_back_late, jobs.report, values.remove):
        crew.add(act)
    crew.run(SECONDS)
    for part in (staging, jobs, values, channel):
        part.check()
    shutil.rmtree(sockets)
    with capsys.disabled():
        rounds = Counter()
        for name, count in crew.rounds.items():
            rounds[name.partition("-")[0]] += count
        print(f"\n{SECONDS:g} s: " + ", ".join(f"{name} {n}" for name, n in rounds.items()))
