# SPDX-License-Identifier: Apache-2.0
"""Real Mooncake processes that die, hang, fill up and come back under a store in use.

Whatever happens, every call ends in time, tells an outcome by name and raises nothing, and bytes
that are called OK are the right ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from mooncake_servers import MIB, wait_until

from kvxfer.stores import Outcome
from kvxfer.stores.checksums import ChecksummedStore

VALUE_BYTES = 1 * MIB
NUM_VALUES = 16
CALL_S = 20
"""No call takes longer: a request of a dead master ends within 5 s, of a silent one within 2 s,
a transfer to a peer without progress within 4 s, and one call has a request and a transfer."""


def keys_of(name, number=NUM_VALUES):
    return [b"faults/%s/%d" % (name.encode(), idx) for idx in range(number)]


def value_of(key):
    return np.random.default_rng(list(key)).bytes(VALUE_BYTES)


def put(store, keys):
    return store.put_from(keys, [memoryview(value_of(key)) for key in keys])


def get(store, keys):
    """Return the outcomes, after a look at the bytes: right where OK, else untouched."""
    targets = [bytearray(b"\xa5") * VALUE_BYTES for _ in keys]
    outcomes = store.get_into(keys, [memoryview(target) for target in targets])
    for key, target, outcome in zip(keys, targets, outcomes, strict=True):
        assert outcome is not Outcome.OK or target == value_of(key)
    return outcomes


class Calls:
    """Repeats a call on a thread while a test does harm; then tells its outcomes."""

    def __init__(self, call):
        self._call, self._stop = call, threading.Event()
        self.outcomes, self.seconds, self.errors = [], [], []
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._started.wait(CALL_S)

    def _run(self):
        number = 0
        while not self._stop.is_set():
            start = time.monotonic()
            try:
                self.outcomes += self._call(number)
            except Exception as error:
                self.errors.append(error)
                self._started.set()
                raise
            self.seconds.append(time.monotonic() - start)
            self._started.set()
            number += 1

    def wait_for(self, outcome, timeout_s=2 * CALL_S):
        """Wait until a call after this one tells ``outcome``."""
        start = len(self.outcomes)
        wait_until(lambda: outcome in self.outcomes[start:], timeout_s)

    def stop(self):
        self._stop.set()
        self._thread.join(2 * CALL_S)
        assert not self._thread.is_alive()
        assert self.errors == []
        assert max(self.seconds) < CALL_S


def test_the_master_dies_in_mid_get_and_comes_back(start, open_on):
    pool = start()
    store = open_on(pool)
    keys = keys_of("get")
    assert set(put(store, keys)) == {Outcome.OK}
    calls = Calls(lambda _: get(store, keys))
    pool.master.kill()
    calls.wait_for(Outcome.FAILED)
    assert set(calls.outcomes) == {Outcome.OK, Outcome.FAILED}
    began = time.monotonic()
    assert store.exists(keys) == bytes(NUM_VALUES)
    assert set(put(store, keys_of("more"))) == {Outcome.FAILED}
    assert time.monotonic() - began < 1  # refused at once
    pool.master.start()
    calls.wait_for(Outcome.MISSING)  # a restarted master knows no values
    calls.stop()
    wait_until(lambda: set(put(store, keys)) <= {Outcome.OK, Outcome.EXISTS}, 30)
    assert set(get(store, keys)) == {Outcome.OK}
    counters = store.stats().counters
    assert counters["master_lost"] >= 1
    assert counters["master_found"] >= 1


def test_the_master_dies_in_mid_put(start, open_on):
    pool = start()
    store = open_on(pool)

    def put_and_remove(number):
        keys = keys_of(f"put{number}", 4)
        outcomes = put(store, keys)
        store.remove(keys)
        return outcomes

    calls = Calls(put_and_remove)
    pool.master.kill()
    calls.wait_for(Outcome.FAILED)
    calls.stop()
    assert set(calls.outcomes) == {Outcome.OK, Outcome.FAILED}


def test_the_owner_of_the_segment_dies_in_mid_get(start, open_on):
    pool = start()
    store = open_on(pool)
    keys = keys_of("owner")
    assert set(put(store, keys)) == {Outcome.OK}
    calls = Calls(lambda _: get(store, keys))
    pool.owners[0].kill()
    calls.wait_for(Outcome.FAILED)
    calls.wait_for(Outcome.MISSING)  # the master gives up the owner's values
    calls.stop()
    assert set(calls.outcomes) == {Outcome.OK, Outcome.FAILED, Outcome.MISSING}
    assert store.stats().counters["get_failed_transfer"] >= 1
    pool.add_owner(96 * MIB)
    wait_until(lambda: set(put(store, keys)) <= {Outcome.OK, Outcome.EXISTS}, 30)
    assert set(get(store, keys)) == {Outcome.OK}


def test_the_owner_of_the_segment_dies_in_mid_put(start, open_on):
    pool = start()
    store = open_on(pool)
    calls = Calls(lambda number: put(store, keys_of(f"put{number}", 2)))
    pool.owners[0].kill()
    wait_until(lambda: {Outcome.FAILED, Outcome.NO_SPACE} & set(calls.outcomes))
    calls.stop()
    assert set(calls.outcomes) <= {Outcome.OK, Outcome.FAILED, Outcome.NO_SPACE}
    assert store.stats().counters["put_backoffs"] >= 1


PRODUCER = """
import sys
sys.path[:0] = sys.argv[2:]
from test_mooncake_faults import keys_of, put
from kvxfer.stores import open_store
store = open_store(sys.argv[1])
print("up", flush=True)
put(store, keys_of("killed", 64))
print("done", flush=True)
"""


def test_a_producer_killed_in_mid_put_leaves_whole_values_or_none(start, open_on):
    """Its half of a value is given up by the master, and the key can be put again."""
    pool = start(flags=["--put_start_discard_timeout_sec=1", "--put_start_release_timeout_sec=2"])
    store, keys = open_on(pool), keys_of("killed", 64)
    found = set()
    for _ in range(2):
        command = [sys.executable, "-c", PRODUCER, pool.master.uri(batch_keys=1), *sys.path]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as producer:
            assert producer.stdout.readline() == b"up\n"
            wait_until(lambda: 1 in store.exists(keys))
            producer.kill()
        outcomes = get(store, keys)
        found.update(outcomes)
        assert set(outcomes) <= {Outcome.OK, Outcome.MISSING}
        wait_until(lambda: set(put(store, keys)) == {Outcome.EXISTS})
        wait_until(lambda: set(get(store, keys)) == {Outcome.OK})
        store.remove(keys)
    assert Outcome.MISSING in found


@pytest.mark.parametrize("which", ["master", "owner"])
def test_a_process_that_hangs_fails_calls_in_time(start, open_on, which):
    pool = start(client_ttl_s=100)
    store = open_on(pool)
    keys = keys_of("hang", 4)
    assert set(put(store, keys)) == {Outcome.OK}
    process = pool.master.process if which == "master" else pool.owners[0].process
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # all of its threads have stopped
    began = time.monotonic()
    assert set(get(store, keys)) == {Outcome.FAILED}
    assert time.monotonic() - began < CALL_S
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: set(get(store, keys)) == {Outcome.OK}, 30)
    reason = "timed_out" if which == "master" else "transfer"
    assert store.stats().counters[f"get_failed_{reason}"] >= 1


def test_a_full_pool_is_told_backed_off_and_used_again(start, open_on):
    pool = start(16 * MIB, lease_ms=3000)
    store = open_on(pool)
    keys = keys_of("full", 24)
    outcomes = put(store, keys)
    stored = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK]
    assert set(outcomes) == {Outcome.OK, Outcome.NO_SPACE}
    assert store.exists(stored).count(1) > 0  # leased: they may not leave yet
    assert set(put(store, keys_of("later", 4))) <= {Outcome.OK, Outcome.NO_SPACE}
    seconds = wait_until(lambda: Outcome.OK in put(store, keys_of("again", 1)), 30)
    assert seconds < 30
    counters = store.stats().counters
    assert counters["put_no_space"] >= 1
    assert counters["put_backoffs"] >= 1


def test_values_that_leave_between_exists_and_get_are_missing(start, open_on):
    pool = start(16 * MIB, lease_ms=100)
    store = open_on(pool)
    keys = keys_of("gone", 8)
    assert set(put(store, keys)) == {Outcome.OK}
    assert store.exists(keys) == b"\1" * 8
    pushed = []

    def push():
        """Put values that are leased later than those of ``keys``, until they are twice as many."""
        more = keys_of(f"push{len(pushed)}", 2)
        pushed.extend(outcome for outcome in put(store, more) if outcome is Outcome.OK)
        store.exists(more)
        return len(pushed) >= 16

    wait_until(push)
    assert Outcome.MISSING in get(store, keys)


def test_a_lease_that_is_shorter_than_the_load_is_a_failure_by_name(start, open_on):
    pool = start(lease_ms=1)
    store = open_on(pool)
    keys = keys_of("short")
    assert set(put(store, keys)) == {Outcome.OK}
    wait_until(lambda: Outcome.FAILED in get(store, keys))
    assert store.stats().counters["get_failed_lease_expired"] >= 1


def test_another_prefix_and_another_users_values_survive_a_reset(start, open_on):
    pool = start()
    ours, theirs = open_on(pool), open_on(pool)
    mine, other = keys_of("mine", 3), [b"faults/other", b"vllm@model@ff", b"faults.mine/0"]
    assert set(put(ours, mine)) == set(put(theirs, other)) == {Outcome.OK}
    assert theirs.exists(mine) == b"\1\1\1"
    assert ours.remove_prefix(b"faults/mine/") == 3
    assert theirs.exists(mine) == b"\0\0\0"
    assert set(get(ours, other)) == {Outcome.OK}


def test_checksums_lie_beside_values_in_the_pool(start, open_on):
    pool = start()
    inner = open_on(pool)
    store, keys = ChecksummedStore(inner), keys_of("sums", 6)
    assert set(put(store, keys)) == {Outcome.OK}
    assert store.exists(keys) == b"\1" * 6
    assert set(get(store, keys)) == {Outcome.OK}
    inner.remove(keys[:1])
    inner.put_from(keys[:1], [memoryview(bytes(VALUE_BYTES))])
    assert store.get_into(keys[:1], [memoryview(bytearray(VALUE_BYTES))]) == [Outcome.CORRUPT]


def test_two_stores_of_one_pool_share_values_and_the_wire_stays_bounded(start, open_on):
    pool = start()
    writer, reader = open_on(pool), open_on(pool, batch_keys=3, in_flight=8)
    keys = keys_of("shared", 24)
    assert set(put(writer, keys)) == {Outcome.OK}
    assert set(put(reader, keys)) == {Outcome.EXISTS}
    outcomes = []
    threads = [threading.Thread(target=lambda: outcomes.extend(get(reader, keys))) for _ in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == [Outcome.OK] * 4 * len(keys)
    assert reader._transfers._wire.peak_segments <= 8
