# SPDX-License-Identifier: Apache-2.0
"""File locks exclude each other, give up at a deadline and go with their process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from kvxfer.stores.lmdb_locks import FileLock, Gate


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


def soon() -> float:
    return time.monotonic() + 0.05


def test_exclusive_locks_exclude_and_shared_ones_do_not(path):
    first, second = FileLock(path), FileLock(path)
    assert first.try_lock(exclusive=False)
    assert second.try_lock(exclusive=False)
    assert not second.try_lock(exclusive=True)
    first.unlock()
    assert second.try_lock(exclusive=True)
    assert not first.try_lock(exclusive=False)
    second.close()
    assert first.try_lock(exclusive=True)
    first.close()


def test_lock_gives_up_at_the_deadline(path):
    first, second = FileLock(path), FileLock(path)
    assert first.lock(exclusive=True, deadline=soon())
    started = time.monotonic()
    assert not second.lock(exclusive=True, deadline=started + 0.05)
    assert 0.05 <= time.monotonic() - started < 5
    first.close()
    second.close()


def test_gate_lets_one_thread_in_at_a_time(path):
    gate = Gate(path)
    inside = most_inside = 0
    entered = 0

    def work() -> None:
        nonlocal inside, most_inside, entered
        for _ in range(200):
            with gate.entered(time.monotonic() + 30) as is_inside:
                assert is_inside
                inside += 1
                most_inside = max(most_inside, inside)
                inside -= 1
                entered += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most_inside, entered) == (1, 800)
    gate.close()


@pytest.mark.parametrize("other", ["thread", "process"])
def test_gate_gives_up_at_the_deadline(path, other):
    gate = Gate(path)
    blocker = gate if other == "thread" else Gate(path)
    outcomes = []

    def enter() -> None:
        with gate.entered(soon()) as inside:
            outcomes.append(inside)

    with blocker.entered(soon()) as inside:
        assert inside
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    enter()
    assert outcomes == [False, True]


def test_a_killed_process_loses_its_lock(path):
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w');"
        "fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-S", "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"held\n"
        lock = FileLock(path)
        assert not lock.try_lock(exclusive=True)
        child.kill()
        assert lock.lock(exclusive=True, deadline=time.monotonic() + 30)
        lock.close()
