# SPDX-License-Identifier: Apache-2.0
"""Child processes of the store tests: ``python store_children.py <function> <arguments>``."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator

import lmdb

from kvxfer.stores import Outcome, Store, lmdb_handle, open_store


def start(function: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a child that runs a function of this module; its lines come from ``stdout``."""
    return subprocess.Popen(
        [sys.executable, __file__, function, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )


@contextlib.contextmanager
def children(*commands: tuple[object, ...]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start children, and kill those that are left at the end of the block, with their own."""
    started = [start(*command) for command in commands]
    try:
        yield started
    finally:
        for child in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()


def finish(child: subprocess.Popen[str]) -> list[str]:
    """Wait for a child to succeed and return its remaining lines."""
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0, f"{child.args} ended with {child.returncode}: {output}"
    return output.splitlines()


def say(*words: object) -> None:
    """Write a line at once: children of one child share a pipe."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def value(key: bytes) -> bytes:
    """Return 16 to 48 KiB that belong to the key, different in every 32 bytes of another's."""
    digest = hashlib.sha256(key).digest()
    return digest * (512 + digest[0] * 4)


def put(store: Store, keys: list[bytes]) -> list[Outcome]:
    return store.put_from(keys, [memoryview(value(key)) for key in keys])


def get_whole(store: Store, key: bytes) -> bool:
    """Return whether the key is there; what is there must be the key's whole value."""
    expected = value(key)
    target = bytearray(len(expected))
    (outcome,) = store.get_into([key], [memoryview(target)])
    assert outcome in (Outcome.OK, Outcome.MISSING), outcome
    assert outcome is Outcome.MISSING or target == expected
    return outcome is Outcome.OK


def write(uri: str, name: str, num_batches: str) -> None:
    """Put batches of 8 keys, a line per batch, then a line that counts the outcomes."""
    store = open_store(uri)
    outcomes = Counter[str]()
    for batch in range(int(num_batches)):
        keys = [f"{name}/{batch}/{idx}".encode() for idx in range(8)]
        outcomes.update(outcome.name for outcome in put(store, keys))
        say(batch)
    store.close()
    say(dict(outcomes))


def write_for_ever(uri: str, names: str) -> None:
    """Fork a writer per name, so that importing is done once; all say name, pid and batch."""
    for name in names.split(","):
        if os.fork() == 0:
            store = open_store(uri)
            for batch in itertools.count():
                put(store, [f"{name}/{batch}/{idx}".encode() for idx in range(8)])
                say(name, os.getpid(), batch)
    while True:
        os.wait()


def read(uri: str, names: str, num_batches: str) -> None:
    """Look up and get keys of every 16th batch until stdin ends; say how many were there.

    More of them would lease the whole store.
    """
    store = open_store(uri)
    rng = random.Random(1)
    num_whole = 0
    say("reading")
    os.set_blocking(0, False)
    while sys.stdin.buffer.read(1) is None:
        name, batch = rng.choice(names.split(",")), rng.randrange(0, int(num_batches), 16)
        keys = [f"{name}/{batch}/{idx}".encode() for idx in range(8)]
        found = store.exists(keys)
        for key, was_there in zip(keys, found, strict=True):
            is_whole = get_whole(store, key)
            assert is_whole or not was_there, "a leased key was evicted"
            num_whole += is_whole
    store.close()
    say(num_whole)


def open_and_put(uri: str, name: str) -> None:
    """Wait for a line, open the store, put a key, read those of all names, wait for the end."""
    sys.stdin.readline()
    store = open_store(uri)
    say(put(store, [name.encode()])[0].name)
    sys.stdin.readline()
    assert get_whole(store, name.encode())
    say("there")
    store.close()


def hold_transactions(uri: str, most: str) -> None:
    """Open read transactions, as many as there can be up to ``most``; hold them until killed."""
    store = open_store(uri)
    env = store._reference.handle()._env
    held = []
    with contextlib.suppress(lmdb.ReadersFullError):
        while len(held) < int(most):
            held.append(env.begin())
    say("holding")
    sys.stdin.readline()


def evict_until_killed(uri: str) -> None:
    """Stop in the middle of an eviction, inside the gate, with a write transaction open."""
    store = open_store(uri)
    handle = store._reference.handle()
    with (
        handle._gate.entered(time.monotonic() + 60),
        handle.writer._uses.evicting(),
        handle._env.begin(write=True) as txn,
    ):
        txn.put(b"half", b"done" * 10_000, db=handle.reader._tables.values)
        say("evicting")
        sys.stdin.readline()


def in_forked_child(work: Callable[[], None]) -> None:
    """Run ``work`` in a forked child and wait for it to succeed."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0


def use_in_forked_child(uri: str) -> None:
    """Parent and child use what they both call the same store, each after the other."""
    store = open_store(uri)
    put(store, [b"parent"])

    def work() -> None:
        assert store.exists([b"parent", b"child"]) == b"\1\0"
        assert put(store, [b"child"]) == [Outcome.OK]
        assert get_whole(store, b"parent")
        in_forked_child(grandchild)
        assert get_whole(store, b"grandchild")
        store.close()
        assert put(store, [b"late"]) == [Outcome.CLOSED]

    def grandchild() -> None:
        assert get_whole(store, b"child")
        assert put(store, [b"grandchild"]) == [Outcome.OK]

    in_forked_child(work)
    assert get_whole(store, b"child")
    assert put(store, [b"parent again"]) == [Outcome.OK]
    assert store.stats().num_values == 4
    store.close()
    open_store(uri).close()
    say("done")


def fork_while_reading(uri: str) -> None:
    """Threads read and write all the time; forks wait for a moment between their calls."""
    store = open_store(uri)
    stop = threading.Event()
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for number in itertools.count():
                key = f"{name}/{number % 20}".encode()
                assert put(store, [key])[0].stored
                assert get_whole(store, key)
                if stop.is_set():
                    return
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    def write_and_read() -> None:
        key = b"%d" % os.getpid()
        assert put(store, [key]) == [Outcome.OK]
        assert get_whole(store, key)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for _ in range(10):
        in_forked_child(write_and_read)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert store.stats().num_values > 10
    store.close()
    say("done")


def fork_and_close(uri: str) -> None:
    """A child that closes the store without using it takes nothing from its parent."""
    store = open_store(uri)
    put(store, [b"k"])
    in_forked_child(store.close)
    assert get_whole(store, b"k")
    assert put(store, [b"j"]) == [Outcome.OK]
    store.close()

    def open_in_child() -> None:
        again = open_store(uri)
        assert get_whole(again, b"k")
        again.close()

    in_forked_child(open_in_child)
    say("done")


def fork_in_a_call(uri: str) -> None:
    """A child of a process whose call does not end may go without the store; nothing breaks."""
    lmdb_handle.DRAIN_TIMEOUT_S = 0.05
    store = open_store(uri)
    put(store, [b"k"])
    handle = store._reference.handle()
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay_inside() -> None:
        with handle.call():
            is_inside.set()
            may_leave.wait(30)

    thread = threading.Thread(target=stay_inside)
    thread.start()
    is_inside.wait(30)

    def work() -> None:
        can_open = not lmdb_handle.MUST_CLOSE_INHERITED
        assert store.exists([b"k"]) == bytes([can_open])
        assert put(store, [b"j"]) == [Outcome.OK if can_open else Outcome.FAILED]
        store.close()
        assert put(store, [b"j"]) == [Outcome.CLOSED]

    in_forked_child(work)
    may_leave.set()
    thread.join()
    assert get_whole(store, b"k")
    store.close()
    say("done")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
