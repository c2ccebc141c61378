# SPDX-License-Identifier: Apache-2.0
"""An LMDB store whose own records anybody may have changed: books, marker, headers, use table.

Whatever they hold, calls end in outcomes, ``open_store`` in a store or an error of ours; a get
never says ``OK`` for bytes of another size; and once everybody has closed the store, whoever opens
it next finds one that works.
"""

import json
import math
import os
import shutil
import struct
import tempfile
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.errors import StoreError
from kvxfer.stores import Outcome, lmdb_options, open_store
from kvxfer.stores.lmdb_check import COUNTERS_KEY
from kvxfer.stores.lmdb_uses import HEADER_BYTES, SLOT_BYTES, UseTable

CAPACITY = 1 << 20
LONGEST_CALLS_S = 10
KEYS = [b"key/%d" % idx for idx in range(12)]
SIZE = 30_000


@pytest.fixture(autouse=True, scope="module")
def _small_default_capacity():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmdb_options, "DEFAULT_CAPACITY_BYTES", CAPACITY)
        patch.setattr(lmdb_options, "MIN_DEFAULT_CAPACITY_BYTES", CAPACITY)
        yield


words = st.sampled_from([0, 1, 2, 2**31, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
records = (
    st.binary(max_size=48)
    | st.lists(words, max_size=5).map(lambda numbers: struct.pack(f"<{len(numbers)}Q", *numbers))
    | st.lists(words, max_size=3).map(lambda numbers: struct.pack(f">{len(numbers)}Q", *numbers))
)


def value(key):
    return (key * (SIZE // len(key) + 1))[:SIZE]


@contextmanager
def new_folder():
    path = Path(tempfile.mkdtemp(prefix="kvx"))
    try:
        yield path / "store"
    finally:
        shutil.rmtree(path)


def open_in(folder, **options):
    text = "&".join(f"{name}={value}" for name, value in options.items())
    return open_store(
        f"lmdb://{folder}?capacity={CAPACITY}&lease_s=0&timeout_s=2&{text}".strip("&")
    )


def fill(store, keys=KEYS):
    return store.put_from(keys, [memoryview(value(key)) for key in keys])


def use(store):
    """Make every call on the store and check what must hold of the answers."""
    started_s = time.monotonic()
    assert set(store.exists(KEYS)) <= {0, 1}
    targets = [bytearray(SIZE) for _ in KEYS]
    outcomes = store.get_into(KEYS, [memoryview(target) for target in targets])
    for key, target, outcome in zip(KEYS, targets, outcomes, strict=True):
        assert bytes(target) == (value(key) if outcome is Outcome.OK else bytes(SIZE))
    news = [b"new/%d" % idx for idx in range(40)]  # more than fits: some have to leave
    assert all(isinstance(outcome, Outcome) for outcome in fill(store, news))
    stats = store.stats()
    assert stats.num_values >= 0
    with suppress(StoreError):  # some may be left
        assert store.remove_prefix(b"new/") >= 0
    assert time.monotonic() - started_s < LONGEST_CALLS_S


def assert_works(folder):
    """Open the store as the next process would; what was damaged is gone or harmless by now."""
    with closing(open_in(folder)) as store:
        use(store)
    with closing(open_in(folder)) as store:
        assert store.put_from([b"one more"], [memoryview(b"1")])[0].stored


def change(store, act):
    """Run ``act(txn, tables)`` in a write transaction of the store's own environment."""
    handle = store._reference.handle()
    with handle._env.begin(write=True) as txn:
        act(txn, handle.writer._ledger.tables)


# The books


@settings(max_examples=15)
@given(records)
@example(b"")
@example(struct.pack("<4Q", 0, 2**64 - 1, 1, 0))
@example(struct.pack("<4Q", 2**64 - 1, 1, 2**64 - 1, 2**64 - 1))
@example(struct.pack("<4Q", 0, 1, 1, 0))
def test_any_record_of_counters_costs_outcomes_only(record):
    with new_folder() as folder:
        with closing(open_in(folder)) as store:
            fill(store)
            change(store, lambda txn, tables: txn.put(COUNTERS_KEY, record, db=tables.state))
            use(store)
        assert_works(folder)


@settings(max_examples=20)
@given(st.lists(st.tuples(records.filter(bool), records), min_size=1, max_size=4))
@example([(b"\0", b"")])
@example([(b"\0" * 16, b"\0" * 8)])
@example([(b"\0" * 16, b"\xff" * 8 + b"k" * 600)])
@example([(b"\xff" * 17, b"\0" * 9)])
def test_any_rows_of_the_order_cost_outcomes_only(rows):
    with new_folder() as folder:
        with closing(open_in(folder)) as store:
            fill(store)
            for rank, record in rows:
                change(
                    store,
                    lambda txn, tables, rank=rank, record=record: txn.put(
                        rank, record, db=tables.order
                    ),
                )
            use(store)
        assert_works(folder)


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["values", "state"]), records.filter(bool), st.binary(max_size=9)
        ),
        min_size=1,
        max_size=4,
    )
)
@example([("values", KEYS[0], b"")])
@example([("values", KEYS[0], b"short")])
@example([("values", b"\xff" * 500, b"x")])
def test_foreign_keys_and_values_of_other_sizes_cost_outcomes_only(rows):
    with new_folder() as folder:
        with closing(open_in(folder)) as store:
            fill(store)
            for name, key, content in rows:
                change(
                    store,
                    lambda txn, tables, name=name, key=key, content=content: txn.put(
                        key, content, db=getattr(tables, name)
                    ),
                )
            use(store)
        assert_works(folder)


def test_rows_that_were_lost_cost_outcomes_only():
    with new_folder() as folder:
        with closing(open_in(folder)) as store:
            fill(store)
            change(store, lambda txn, tables: txn.drop(tables.order, delete=False))
            use(store)
        assert_works(folder)


def test_damage_in_the_books_is_noted_and_the_file_set_aside(caplog):
    with new_folder() as folder:
        with closing(open_in(folder)) as store:
            fill(store)
            change(store, lambda txn, tables: txn.put(COUNTERS_KEY, b"short", db=tables.state))
            assert store.exists(KEYS) == bytes(len(KEYS))
            assert (folder / "damaged").exists()
        with closing(open_in(folder)) as store:
            assert store.stats().num_values == 0
        assert "set aside" in caplog.text


def test_a_target_of_no_bytes_is_refused_or_missed():
    with new_folder() as folder, closing(open_in(folder)) as store:
        change(store, lambda txn, tables: txn.put(b"empty", b"", db=tables.values))
        (outcome,) = store.get_into([b"empty"], [memoryview(bytearray())])
        assert outcome is not Outcome.FAILED


# The marker

marker_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 31, 37, 4096, CAPACITY, CAPACITY + 4096, 2**40, 2**63, math.inf]),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
)


@settings(max_examples=20)
@given(
    st.dictionaries(
        st.sampled_from(
            ["format", "boot_id", "file_bytes", "capacity_bytes", "clean_mtime_ns", "x"]
        ),
        marker_values,
        min_size=1,
        max_size=3,
    )
)
@example({"capacity_bytes": 0})
@example({"capacity_bytes": 37})
@example({"capacity_bytes": -1})
@example({"capacity_bytes": 2**62})
def test_any_marker_gives_a_store_that_works(changes):
    with new_folder() as folder:
        with closing(open_in(folder)) as store:
            fill(store)
        path = folder / "kvxfer.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        with closing(open_store(f"lmdb://{folder}?lease_s=0")) as store:
            use(store)
        assert_works(folder)


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"format":' * 5000, b"\xff\xfe", b"1" * 5000, b"{}" + b" " * (1 << 20)],
    ids=["nested_lists", "nested_objects", "no_text", "a_number", "much"],
)
def test_a_marker_of_any_bytes_gives_a_store_that_works(content):
    with new_folder() as folder:
        with closing(open_in(folder)) as store:
            fill(store)
        (folder / "kvxfer.json").write_bytes(content)
        with closing(open_in(folder)) as store:
            use(store)
        assert_works(folder)


@pytest.mark.parametrize("file_bytes", [4096, CAPACITY - 4096, CAPACITY + 4096, 2**40])
def test_a_marker_that_lies_about_an_open_file_is_refused(file_bytes):
    """LMDB would set the file to the size it is given: a SIGBUS for whoever has it mapped."""
    with new_folder() as folder:
        with closing(open_in(folder)) as store:
            fill(store)
            path = folder / "kvxfer.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "file_bytes": file_bytes}))
            with pytest.raises(StoreError, match=r"its marker has another|another version"):
                store._reference.handle().folder._meet(None)
            assert os.stat(folder / "data.mdb").st_size == CAPACITY
            use(store)
        assert_works(folder)


# LMDB's headers


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 8191), st.integers(1, 255)), min_size=1, max_size=6))
@example([(offset, 255) for offset in range(16, 24)])
@example([(4096 + offset, 255) for offset in range(16, 160)])
def test_headers_with_any_bytes_flipped_give_a_store_that_works(flips):
    """The two meta pages: magic, sizes, roots of the trees, last page, transaction ids."""
    with new_folder() as folder:
        with closing(open_in(folder)) as store:
            fill(store)
        flip(folder / "data.mdb", flips)
        assert_works(folder)
        assert os.stat(folder / "data.mdb").st_size == CAPACITY


LAST_PAGE_OFFSETS = [16 + 120, 4096 + 16 + 120]
"""Of ``mm_last_pg`` in the two meta pages: after magic, version, address, map size, two trees."""


@pytest.mark.parametrize("last_page", [CAPACITY // 4096, 2**20, 2**40], ids="last_page={}".format)
def test_a_last_page_beyond_the_file_is_set_aside(last_page, caplog):
    with new_folder() as folder:
        with closing(open_in(folder)) as store:
            fill(store)
        with open(folder / "data.mdb", "r+b") as file:
            for offset in LAST_PAGE_OFFSETS:
                file.seek(offset)
                assert 2 < struct.unpack("<Q", file.read(8))[0] < CAPACITY // 4096
                file.seek(offset)
                file.write(struct.pack("<Q", last_page))
        with closing(open_in(folder)) as store:
            assert os.stat(folder / "data.mdb").st_size == CAPACITY
            use(store)
        assert "set aside" in caplog.text


def flip(path, flips):
    content = bytearray(path.read_bytes())
    for offset, mask in flips:
        content[offset] ^= mask
    path.write_bytes(content)


def test_a_file_that_rotted_after_it_was_closed_in_order_is_set_aside(caplog):
    """Same size and time as when it was marked clean, so that it is not checked first."""
    with new_folder() as folder:
        with closing(open_in(folder)) as store:
            fill(store)
        data = folder / "data.mdb"
        info = data.stat()
        flip(data, [(offset, 255) for offset in (*range(16, 24), *range(4112, 4120))])  # the magic
        os.utime(data, ns=(info.st_atime_ns, info.st_mtime_ns))
        with closing(open_in(folder)) as store:
            use(store)
        assert "set aside" in caplog.text


# The use table


@settings(max_examples=15)
@given(
    epoch=words,
    warmed=words,
    lease=st.sampled_from([math.inf, -math.inf, math.nan, 1e300, -1.0, 5e-324]) | st.floats(),
    last_use=words,
)
@example(epoch=1, warmed=2**64 - 1, lease=math.inf, last_use=2**64 - 1)
@example(epoch=0, warmed=0, lease=math.nan, last_use=0)
def test_any_use_table_gives_a_store_that_works(epoch, warmed, lease, last_use):
    with new_folder() as folder:
        with closing(open_in(folder)) as store:
            fill(store)
        path = folder / "uses.bin"
        num_slots = (path.stat().st_size - HEADER_BYTES) // SLOT_BYTES
        with open(path, "r+b") as file:
            file.write(struct.pack("<2Q", epoch, warmed))
            file.seek(HEADER_BYTES)
            file.write(np.full(num_slots, lease).tobytes())
            file.write(np.full(num_slots, last_use, np.uint64).tobytes())
        with closing(open_in(folder)) as store:
            use(store)
            outcomes = fill(store, [b"late/%d" % idx for idx in range(60)])
            assert outcomes[0].stored, "leases that nobody holds keep the store full"
        assert_works(folder)


TABLE_SIZES = [0, 1, HEADER_BYTES, HEADER_BYTES + 3 * SLOT_BYTES]


@pytest.mark.parametrize("size", TABLE_SIZES)
def test_a_use_table_of_another_size_is_made_anew(size):
    with new_folder() as folder:
        with closing(open_in(folder)) as store:
            fill(store)
        os.truncate(folder / "uses.bin", size)
        assert_works(folder)


@pytest.mark.parametrize("size", TABLE_SIZES)
def test_a_use_table_of_another_size_that_others_have_open_is_refused(size, tmp_path):
    (tmp_path / "uses.bin").write_bytes(bytes(size))
    with pytest.raises(StoreError, match=r"uses\.bin has \d+ bytes"):
        UseTable(tmp_path / "uses.bin")
