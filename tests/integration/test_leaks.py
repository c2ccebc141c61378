# SPDX-License-Identifier: Apache-2.0
"""What engines leave behind in a process that outlives them: nothing; and how long they take.

Descriptors, threads, mapped files, memory, socket files, open stores and their locks are counted
before and after twenty lives of a pair of engines.
"""

import gc
import os
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "transfer"))

import test_two_sides
from memory_store import Gate, MemoryStore
from test_two_sides import Engine, FakeRequest, allocated, step

from kvxfer.lookup import Endpoint
from kvxfer.lookup.protocol import Status
from kvxfer.stores import lmdb_handle, open_store
from kvxfer.stores.lmdb_locks import FileLock

WAIT_S = 20
LIVES = 20
MOST_GROWTH_BYTES = 12 << 20
"""Of resident memory: what the allocator keeps. Each life takes 4 MiB of staging alone."""


def sockets():
    return set(Endpoint.for_engine("any").path.parent.glob("*.sock"))


def mapped_files(folder):
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line
    ]


def our_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("kvxfer")]


def descriptors():
    """Return what each descriptor is, but for the one that lists them."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}").partition(":[")[0])
        except FileNotFoundError:
            continue
    return sorted(links)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def wait_until(holds, what):
    """Threads that were joined and sockets of ZMQ take a moment to go."""
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def live_and_die(store_uri):
    """Make two engines of two ranks each; one saves, the other loads; close both."""
    saver = Engine(store_uri, tp_size=2)
    saver.save("a", [3, 7, 5])
    loader = Engine(store_uri, tp_size=2)
    assert loader.load(FakeRequest("a", 49), [9, 2, 11]) == 48
    saver.close()
    loader.close()


def test_nothing_is_left_behind_by_twenty_lives_of_two_engines(tmp_path):
    folder = tmp_path / "store"
    store_uri = f"lmdb://{folder}?capacity=8MiB"
    for _ in range(3):  # what is made once, and what the allocator keeps
        live_and_die(store_uri)
    gc.collect()
    files, memory, paths = descriptors(), resident_bytes(), sockets()
    num_threads = threading.active_count()
    for _ in range(LIVES):
        live_and_die(store_uri)
    gc.collect()
    wait_until(lambda: len(descriptors()) <= len(files), f"{files}, now {descriptors()}")
    assert our_threads() == []
    assert threading.active_count() <= num_threads
    assert mapped_files(folder) == []
    assert sockets() <= paths
    assert str(folder) not in lmdb_handle._handles
    assert resident_bytes() - memory < MOST_GROWTH_BYTES
    assert_unlocked(folder)


def assert_unlocked(folder):
    """Check that nobody holds a lock of the store: it was left in order and can be taken."""
    for name in ("open.lock", "users.lock", "writer.lock"):
        lock = FileLock(folder / name)
        assert lock.try_lock(exclusive=True), name
        lock.close()


def test_engines_that_are_closed_without_a_step_leave_nothing_behind(tmp_path):
    store_uri = f"lmdb://{tmp_path}/store?capacity=8MiB"
    Engine(store_uri).close()
    gc.collect()
    files, paths = descriptors(), sockets()
    for _ in range(5):
        engine = Engine(store_uri, handshake=False)
        engine.close()
        engine.close()
    wait_until(lambda: len(descriptors()) <= len(files), f"{files}, now {descriptors()}")
    assert our_threads() == []
    assert sockets() <= paths


def test_open_stores_share_what_they_hold_and_the_last_to_close_frees_it(tmp_path):
    uri = f"lmdb://{tmp_path}/store?capacity=8MiB"
    open_store(uri).close()
    files = descriptors()
    for _ in range(LIVES):
        stores = [open_store(uri) for _ in range(3)]
        stores[0].put_from([b"k"], [memoryview(b"value")])
        assert [bytes(store.exists([b"k"])) for store in stores] == [b"\1"] * 3
        for store in stores:
            store.close()
    assert descriptors() == files
    assert mapped_files(tmp_path) == []
    assert_unlocked(tmp_path / "store")


# A store call that does not return


class Stuck:
    """An engine on a store of which one kind of call does not return until the test ends."""

    def __init__(self, monkeypatch, call):
        self.store, self.gate = MemoryStore(), Gate()
        monkeypatch.setattr(test_two_sides, "open_store", lambda uri: self.store)
        self.engine = Engine("lmdb://", close_timeout_s=0.3, load_timeout_s=0.2)
        self.worker = self.engine.workers[0]
        self.call = call

    def stick(self):
        self.store.gates[self.call] = self.gate

    def wait_until_stuck(self):
        assert self.gate.reached.wait(WAIT_S)


@pytest.fixture
def stuck(monkeypatch):
    made = []

    def make(call):
        made.append(Stuck(monkeypatch, call))
        return made[-1]

    yield make
    for one in made:
        one.gate.open()
        one.engine.close()
    wait_until(lambda: our_threads() == [], "a thread outlived its call")


def shutdown_s(engine):
    started_s = time.monotonic()
    engine.close()
    return time.monotonic() - started_s


def test_shutdown_abandons_a_put_that_does_not_return(stuck, caplog):
    one = stuck("put")
    one.stick()
    request = FakeRequest("a", 33)
    one.engine.hit(request)
    one.engine.scheduler.update_state_after_alloc(request, allocated(1, 2), 0)
    one.engine.run_step(new=[("a", 0, 33)], tables={"a": [1, 2]})
    one.wait_until_stuck()
    saver = one.worker._saver
    assert shutdown_s(one.engine) < 5
    assert saver.num_abandoned == 1
    assert "stuck in a native call; abandoned" in caplog.text
    assert our_threads() == ["kvxfer-save-0"]


def test_shutdown_abandons_a_get_that_does_not_return(stuck, caplog):
    one = stuck("get")
    request = one.engine.save("a", [3, 7, 5])
    one.stick()
    tokens = one.engine.hit(FakeRequest("a", 49))
    assert tokens == 48
    one.engine.scheduler.update_state_after_alloc(
        request, allocated(9, 2, 11), one.engine.hit(request)
    )
    one.engine.run_step()
    one.wait_until_stuck()
    one.engine.until(lambda: one.engine.finished == ["a"])  # by its deadline, and as failed
    assert one.engine.bad_blocks == {9, 2, 11}
    loader = one.worker._loader
    assert shutdown_s(one.engine) < 5
    assert loader.num_abandoned == 1
    assert "stuck in a native call; abandoned" in caplog.text


def test_shutdown_abandons_a_lookup_that_does_not_return(stuck, caplog):
    one = stuck("exists")
    one.stick()
    request = FakeRequest("a", 33)
    scheduler = one.engine.scheduler
    assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    one.wait_until_stuck()
    assert shutdown_s(one.engine) < 10
    assert one.worker._server.counters.abandoned == 1
    assert "is still in a handler" in caplog.text
    assert not one.worker._server.endpoint.path.exists()


def test_steps_go_on_while_the_store_does_not_answer(stuck):
    """Lookups become misses and saves wait; no call of a step waits for the store."""
    one = stuck("exists")
    one.stick()
    slowest_s = 0.0
    for number in range(50):
        started_s = time.monotonic()
        request = FakeRequest(f"r{number}", 33)
        one.engine.scheduler.get_num_new_matched_tokens(request, 0)
        one.engine.run_step()
        slowest_s = max(slowest_s, time.monotonic() - started_s)
        one.engine.scheduler.request_finished(request)
    assert slowest_s < 1.0
    assert one.engine.scheduler._lookups.num_open == 0


def test_a_lookup_after_the_store_was_closed_is_a_miss(tmp_path):
    engine = Engine(f"lmdb://{tmp_path}/store?capacity=8MiB")
    engine.save("a", [3, 7, 5])
    engine.workers[0]._store.close()
    reply = engine.scheduler._lookups.lookup(
        "a", 49, FakeRequest("a", 49).block_hashes, blocking=True
    )
    assert (reply.status, reply.hit_length) == (Status.OK, 0)
    assert isinstance(engine.scheduler.build_connector_meta(step()).loads, tuple)
    engine.close()
