# SPDX-License-Identifier: Apache-2.0
"""One LMDB store, several processes: some writing, some reading, some killed."""

from __future__ import annotations

import ast
import os
import random
import signal

import lmdb
import pytest
from store_children import children, finish, get_whole, put

from kvxfer.stores import Outcome, lmdb_handle, open_store


def uri_of(tmp_path, **options):
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"lmdb://{tmp_path}/store?{query}"


def all_keys(store):
    """Return every key, sorted."""
    reader = store._reference.handle().reader
    with reader._snapshot() as txn:
        cursor = txn.cursor(db=reader._tables.values)
        return [bytes(key) for key in cursor.iternext(keys=True, values=False)]


def test_writers_of_ten_times_the_capacity_and_readers_get_along(tmp_path):
    """No put fails, no value is torn, nothing leased goes: the children check each of these."""
    uri = uri_of(tmp_path, capacity="16MiB", lease_s=600)
    num_batches = 16 * 10 * (1 << 20) // (3 * 8 * 32_768) + 1
    names = ["a", "b", "c"]
    commands = [("write", uri, name, num_batches) for name in names]
    with children(*commands, ("read", uri, ",".join(names), num_batches)) as started:
        *writers, reader = started
        assert reader.stdout.readline() == "reading\n"
        outcomes = [ast.literal_eval(finish(writer)[-1]) for writer in writers]
        num_whole = int(finish(reader)[-1])
    stored = sum(counts.get("OK", 0) for counts in outcomes)
    refused = sum(counts.get("NO_SPACE", 0) for counts in outcomes)
    assert stored + refused == 3 * 8 * num_batches
    assert refused == 0
    assert num_whole > 0
    store = open_store(uri)
    assert store.stats().used_bytes <= 0.85 * (16 << 20)
    assert store.stats().num_values > 200
    store.close()


def test_killed_writers_leave_whole_values_and_a_working_store(tmp_path):
    """Fifteen kills in the middle of puts, while others write; the store is open here as well."""
    uri = uri_of(tmp_path, capacity="16MiB", lease_s=0)
    store = open_store(uri)
    rng = random.Random(3)
    alive = {f"writer-{idx}" for idx in range(15)}
    with children(("write_for_ever", uri, ",".join(sorted(alive)))) as (parent,):
        while alive:
            name, pid, _ = parent.stdout.readline().split()
            if name in alive and rng.random() < 0.1:
                os.kill(int(pid), signal.SIGKILL)
                alive.remove(name)
                assert put(store, [name.encode()]) == [Outcome.OK]
                assert get_whole(store, name.encode())
    store.close()
    store = open_store(uri)
    keys = all_keys(store)
    assert len(keys) == store.stats().num_values > 100
    assert all(get_whole(store, key) for key in keys)
    assert list((tmp_path / "store").glob("data.mdb.*")) == []
    store.close()


def test_a_store_survives_the_death_of_its_only_process(tmp_path):
    uri = uri_of(tmp_path, capacity="16MiB")
    with children(("write", uri, "w", 100_000)) as (writer,):
        for _ in range(3):
            writer.stdout.readline()
        writer.kill()
        writer.wait()
    store = open_store(uri)
    keys = [f"w/{batch}/{idx}".encode() for batch in range(3) for idx in range(8)]
    assert store.exists(keys) == b"\1" * len(keys)
    assert all(get_whole(store, key) for key in keys)
    store.close()


def test_a_process_killed_in_an_eviction_is_cleaned_up_after(tmp_path):
    uri = uri_of(tmp_path, capacity="4MiB")
    store = open_store(uri)
    put(store, [b"k"])
    uses = store._reference.handle().reader._uses
    with children(("evict_until_killed", uri)) as (evictor,):
        assert evictor.stdout.readline() == "evicting\n"
        assert store.exists([b"k", b"half"]) == b"\1\0"
        assert get_whole(store, b"k")
        assert uses.epoch % 2 == 1
        evictor.kill()
        evictor.wait()
    assert store.exists([b"k", b"half"]) == b"\1\0"
    assert uses.epoch % 2 == 0
    assert put(store, [b"half"]) == [Outcome.OK]
    store.close()


def test_read_transactions_of_a_killed_process_do_not_keep_pages(tmp_path):
    """Its snapshot would pin all pages freed since, and puts would soon find none."""
    uri = uri_of(tmp_path, capacity="4MiB", lease_s=0)
    store = open_store(uri)
    put(store, [b"first"])
    with children(("hold_transactions", uri, 1)) as (holder,):
        assert holder.stdout.readline() == "holding\n"
        holder.kill()
        holder.wait()
    outcomes = [put(store, [b"%d" % number])[0] for number in range(400)]
    assert set(outcomes) == {Outcome.OK}
    store.close()


def test_a_live_reader_that_keeps_its_snapshot_costs_puts_and_no_more(tmp_path):
    uri = uri_of(tmp_path, capacity="4MiB", lease_s=0)
    store = open_store(uri)
    with children(("hold_transactions", uri, 1)) as (holder,):
        assert holder.stdout.readline() == "holding\n"
        assert put(store, [b"0"]) == [Outcome.OK]
        number = 0
        while put(store, [b"more/%d" % number]) == [Outcome.OK]:
            number += 1
        assert put(store, [b"other", b"0"]) == [Outcome.NO_SPACE, Outcome.EXISTS]
        assert get_whole(store, b"0")
        holder.kill()
        holder.wait()
    assert put(store, [b"after"]) == [Outcome.OK]
    store.close()


@pytest.mark.skipif(lmdb.__version__ < "2", reason="older py-lmdb keeps a reader slot at hand")
def test_reader_slots_of_a_killed_process_are_used_again(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_handle, "MOST_READERS", 4)
    uri = uri_of(tmp_path, capacity="4MiB")
    store = open_store(uri)
    put(store, [b"k"])
    with children(("hold_transactions", uri, 4)) as (holder,):
        assert holder.stdout.readline() == "holding\n"
        assert store.exists([b"k"]) == b"\0"
        assert store.stats().counters["exists_failed"] == 1
        target = memoryview(bytearray(1))
        assert store.get_into([b"k"], [target]) == [Outcome.FAILED]
        holder.kill()
        holder.wait()
    assert store.exists([b"k"]) == b"\1"
    assert get_whole(store, b"k")
    store.close()


@pytest.mark.parametrize("damaged", [False, True], ids=["fresh", "damaged"])
def test_processes_may_open_a_store_at_once(tmp_path, damaged):
    """One makes it, or sets it aside once; no one finds it half made."""
    uri = uri_of(tmp_path, capacity="4MiB")
    if damaged:
        open_store(uri).close()
        (tmp_path / "store" / "data.mdb").write_bytes(b"x" * 4096)
    names = [f"name/{idx}" for idx in range(5)]
    with children(*[("open_and_put", uri, name) for name in names]) as started:
        for child in started:
            child.stdin.write("go\n")
            child.stdin.flush()
        assert [child.stdout.readline() for child in started] == ["OK\n"] * 5
        store = open_store(uri)
        assert store.exists([name.encode() for name in names]) == b"\1" * 5
        assert [finish(child) for child in started] == [["there"]] * 5
        store.close()
    assert len(list((tmp_path / "store").glob("data.mdb.damaged-*"))) == damaged


def test_a_store_open_on_another_host_is_refused(tmp_path, monkeypatch):
    uri = uri_of(tmp_path, capacity="4MiB")
    with children(("open_and_put", uri, "name")) as (child,):
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "OK\n"
        monkeypatch.setattr("kvxfer.stores.lmdb_files.boot_id", lambda: os.urandom(4).hex())
        with pytest.raises(OSError, match="open on another host"):
            open_store(uri)
