# SPDX-License-Identifier: Apache-2.0
"""The folder of an LMDB store: modes, trust, setting aside, capacity, full and read-only disks."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from kvxfer.errors import StoreError
from kvxfer.stores import Outcome, lmdb_data, lmdb_files, lmdb_writer, open_store
from kvxfer.stores.lmdb_marker import read_marker, write_marker

CAPACITY = 2 << 20
KEYS = [b"key/%d" % idx for idx in range(20)]
SIZE = 30_000


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


def open_in(folder, capacity=CAPACITY):
    return open_store(f"lmdb://{folder}?capacity={capacity}")


def value(key):
    return (key * (SIZE // len(key) + 1))[:SIZE]


def put_all(store):
    assert set(store.put_from(KEYS, [memoryview(value(key)) for key in KEYS])) == {Outcome.OK}


def fill(folder):
    """Make a store with ``KEYS`` in it and close it in order."""
    store = open_in(folder)
    put_all(store)
    store.close()


def change_marker(folder, **changes):
    write_marker(folder, dataclasses.replace(read_marker(folder), **changes))


def held(folder):
    """Open the store, return how many of ``KEYS`` are whole in it, and put one more."""
    store = open_in(folder)
    num_whole = 0
    for key in KEYS:
        target = bytearray(SIZE)
        (outcome,) = store.get_into([key], [memoryview(target)])
        assert outcome in (Outcome.OK, Outcome.MISSING)
        assert outcome is Outcome.MISSING or target == value(key)
        num_whole += outcome is Outcome.OK
    assert store.put_from([b"one more"], [memoryview(b"1")])[0].stored
    store.close()
    return num_whole


def aside(folder, kind):
    return sorted(path.name for path in folder.glob(f"data.mdb.{kind}-*"))


# Modes


def test_folder_and_files_are_private(folder):
    old_mask = os.umask(0)
    try:
        fill(folder)
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert "data.mdb" in modes
    assert set(modes.values()) == {0o600}


def test_an_empty_folder_open_to_others_is_closed_to_them(folder, caplog):
    folder.mkdir(mode=0o755)
    fill(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "its mode is now 0700" in caplog.text


def test_a_folder_open_to_others_that_holds_other_files_is_refused(folder):
    folder.mkdir(mode=0o755)
    (folder / "thesis.txt").touch()
    with pytest.raises(StoreError, match=r"holds other files; choose a folder .* alone"):
        open_in(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(StoreError, match="belongs to user"):
        open_in(folder)


def test_a_network_file_system_is_refused(folder, monkeypatch):
    monkeypatch.setattr(lmdb_files, "filesystem_of", lambda path: "nfs4")
    with pytest.raises(StoreError, match="nfs4; LMDB needs a disk of this host"):
        open_in(folder)


def test_a_path_that_is_a_file_is_refused(folder):
    folder.write_text("x")
    with pytest.raises(StoreError):
        open_in(folder)
    assert folder.read_text() == "x"


# Trust


def test_a_store_closed_in_order_is_trusted_without_a_check(folder, monkeypatch):
    fill(folder)
    monkeypatch.setattr(lmdb_data, "_check_in_child", lambda folder: pytest.fail("checked"))
    assert held(folder) == len(KEYS)


def test_a_store_closed_in_order_survives_a_restart_of_the_host(folder):
    fill(folder)
    change_marker(folder, boot_id="an earlier one")
    assert held(folder) == len(KEYS)
    assert aside(folder, "damaged") == []


def test_a_store_left_open_is_checked_and_kept(folder, monkeypatch):
    fill(folder)
    change_marker(folder, clean_mtime_ns=None)
    checks = []
    check = lmdb_data._check_in_child
    monkeypatch.setattr(
        lmdb_data, "_check_in_child", lambda folder: checks.append(check(folder)) or checks[-1]
    )
    assert held(folder) == len(KEYS)
    assert checks == [""]


def test_a_store_left_open_when_the_host_went_down_is_set_aside(folder, caplog):
    """Its pages may be missing anywhere, in a value too, where no check can see it."""
    fill(folder)
    change_marker(folder, clean_mtime_ns=None, boot_id="an earlier one")
    assert held(folder) == 0
    assert len(aside(folder, "damaged")) == 1
    assert "open when the operating system went down; starting empty" in caplog.text


def test_leases_and_ages_start_anew_after_a_restart_of_the_host(folder):
    fill(folder)
    store = open_in(folder)
    store.exists(KEYS)
    uses = store._reference.handle().reader._uses
    assert uses.is_leased(uses.slot(KEYS[0]), 0.0)
    store.close()
    change_marker(folder, boot_id="an earlier one")
    store = open_in(folder)
    uses = store._reference.handle().reader._uses
    assert not uses.is_leased(uses.slot(KEYS[0]), 0.0)
    store.close()


# Setting aside


@pytest.mark.parametrize(
    "damage",
    ["metas", "start", "everything", "pages", "shorter", "longer", "empty"],
    ids="damage={}".format,
)
def test_a_damaged_file_is_set_aside(folder, damage):
    """The opening process lives, and finds an empty store that works."""
    fill(folder)
    data = folder / "data.mdb"
    if damage in ("shorter", "longer", "empty"):
        size = {"shorter": CAPACITY - 4096, "longer": CAPACITY + 4096, "empty": 0}[damage]
        os.truncate(data, size)
    else:
        start, end = {
            "metas": (0, 8192),
            "start": (0, 65_536),
            "everything": (0, CAPACITY),
            "pages": (8192, 65_536),
        }[damage]
        with open(data, "r+b") as file:
            file.seek(start)
            file.write(os.urandom(end - start))
    assert held(folder) == 0
    assert len(aside(folder, "damaged")) == 1


def test_damage_that_ends_the_check_by_a_signal_is_set_aside(folder, monkeypatch, caplog):
    fill(folder)
    change_marker(folder, clean_mtime_ns=None)
    killer = folder.parent / "killer.py"
    killer.write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setattr(lmdb_data.lmdb_check, "__file__", str(killer))
    assert held(folder) == 0
    assert "its check ended with status -11" in caplog.text


def test_a_check_that_hangs_is_ended(folder, monkeypatch, caplog):
    fill(folder)
    change_marker(folder, clean_mtime_ns=None)
    sleeper = folder.parent / "sleeper.py"
    sleeper.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(lmdb_data.lmdb_check, "__file__", str(sleeper))
    monkeypatch.setattr(lmdb_data, "CHECK_TIMEOUT_S", 0.1)
    assert held(folder) == 0
    assert "its check did not finish" in caplog.text


def test_books_that_do_not_agree_are_set_aside(folder, caplog):
    fill(folder)
    env = lmdb.open(os.fspath(folder), map_size=CAPACITY, max_dbs=3)
    with env.begin(write=True) as txn:
        txn.delete(KEYS[3], db=env.open_db(b"values", txn=txn))
    env.close()
    assert held(folder) == 0
    assert "order names the absent key" in caplog.text


def test_damage_that_lmdb_reported_is_set_aside_at_the_next_opening(folder, monkeypatch):
    fill(folder)
    store = open_in(folder)
    reader = store._reference.handle().reader

    def fail(keys):
        raise lmdb.CorruptedError("mdb_get", -30796)

    monkeypatch.setattr(reader, "_look", fail)
    assert store.exists(KEYS) == bytes(len(KEYS))
    assert set(store.put_from(KEYS, [memoryview(b"1")] * len(KEYS))) == {Outcome.FAILED}
    store.close()
    assert held(folder) == 0
    assert len(aside(folder, "damaged")) == 1


@pytest.mark.parametrize("content", ["text", "lmdb"])
def test_a_foreign_file_is_set_aside_unharmed(folder, content):
    folder.mkdir(mode=0o700)
    if content == "text":
        (folder / "data.mdb").write_bytes(b"something else entirely" * 1000)
    else:
        env = lmdb.open(os.fspath(folder), map_size=1 << 20)
        with env.begin(write=True) as txn:
            txn.put(b"theirs", b"1")
        env.close()
    before = (folder / "data.mdb").read_bytes()
    assert held(folder) == 0
    fill(folder)
    change_marker(folder, format=0)
    assert held(folder) == 0
    name = next(name for name in aside(folder, "foreign") if not name.endswith("-lock"))
    assert (folder / name).read_bytes() == before


def test_another_format_is_set_aside(folder):
    fill(folder)
    change_marker(folder, format=99)
    assert held(folder) == 0
    assert read_marker(folder).format == 1


def test_only_the_newest_damaged_file_is_kept(folder):
    for _ in range(3):
        fill(folder)
        os.truncate(folder / "data.mdb", 4096)
    assert held(folder) == 0
    assert len(aside(folder, "damaged")) == 1


def test_a_store_whose_making_was_interrupted_is_made_anew(folder):
    fill(folder)
    (folder / "data.mdb").unlink()
    (folder / "new").mkdir()
    (folder / "new" / "data.mdb").write_bytes(b"part")
    assert held(folder) == 0
    assert not (folder / "new").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', b'{"format": "x"}'])
def test_an_unreadable_marker_is_no_marker(folder, content):
    fill(folder)
    (folder / "kvxfer.json").write_bytes(content)
    assert held(folder) == 0


# Capacity


def test_a_larger_capacity_grows_the_file_and_keeps_the_values(folder):
    fill(folder)
    store = open_in(folder, 2 * CAPACITY)
    assert store.exists(KEYS) == b"\1" * len(KEYS)
    assert store.stats().capacity_bytes == 2 * CAPACITY
    more = [b"more/%d" % idx for idx in range(80)]
    assert set(store.put_from(more, [memoryview(bytes(SIZE))] * 80)) == {Outcome.OK}
    assert store.exists(KEYS + more) == b"\1" * 100
    store.close()
    assert (folder / "data.mdb").stat().st_size == 2 * CAPACITY
    assert held_blocks(folder / "data.mdb") >= 2 * CAPACITY


def test_a_larger_capacity_on_a_full_disk_keeps_the_old_one(folder, monkeypatch, caplog):
    fill(folder)

    allocate = lmdb_data.allocate

    def refuse_growth(fd, start, length):
        if start == 0:  # the lock file
            return allocate(fd, start, length)
        os.pwrite(fd, b"part", start + 4096)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lmdb_data, "allocate", refuse_growth)
    store = open_in(folder, 2 * CAPACITY)
    assert store.exists(KEYS) == b"\1" * len(KEYS)
    assert store.stats().capacity_bytes == CAPACITY
    assert (folder / "data.mdb").stat().st_size == CAPACITY
    assert "keeps 2097152 bytes" in caplog.text
    store.close()


def test_lock_file_has_no_holes_that_a_full_disk_could_not_fill(folder, monkeypatch):
    made = []
    open_environment = lmdb_data.lmdb.open

    def note_lock(path, **options):
        if options.get("lock", True):
            lock = Path(path) / lmdb_data.LOCK_NAME
            made.append(held_blocks(lock) >= lock.stat().st_size > 0)
        return open_environment(path, **options)

    monkeypatch.setattr(lmdb_data.lmdb, "open", note_lock)
    store = open_in(folder)
    assert made == [True, True]  # the file in the making, and the one in use
    lock = folder / lmdb_data.LOCK_NAME
    assert held_blocks(lock) >= lock.stat().st_size > 64 * 1024
    store.close()


def test_a_disk_without_room_for_the_lock_file_is_told(folder, monkeypatch):
    fill(folder)

    def refuse(fd, start, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lmdb_data, "allocate", refuse)
    with pytest.raises(StoreError, match=r"cannot be opened: .*No space left"):
        open_in(folder)


def test_a_smaller_capacity_lowers_the_limit_and_leaves_the_file(folder):
    fill(folder)
    store = open_in(folder, CAPACITY // 2)
    assert store.exists(KEYS) == b"\1" * len(KEYS)
    assert store.stats().capacity_bytes == CAPACITY // 2
    store.close()
    store = open_store(f"lmdb://{folder}?lease_s=0")
    assert store.stats().capacity_bytes == CAPACITY // 2
    uses = store._reference.handle().reader._uses
    uses._leased_until[:] = 0
    assert store.put_from([b"new"], [memoryview(bytes(SIZE))]) == [Outcome.OK]
    assert store.stats().used_bytes <= 0.85 * CAPACITY / 2
    store.close()
    assert (folder / "data.mdb").stat().st_size == CAPACITY


def test_the_capacity_of_an_open_store_stays(folder):
    first = open_in(folder)
    second = open_in(folder, 4 * CAPACITY)
    assert second.stats().capacity_bytes == CAPACITY
    first.close()
    second.close()


def test_a_store_without_a_capacity_keeps_its_own(folder):
    fill(folder)
    store = open_store(f"lmdb://{folder}")
    assert store.stats().capacity_bytes == CAPACITY
    store.close()


# Disks


def held_blocks(path):
    return path.stat().st_blocks * 512


def test_the_whole_file_is_allocated_when_it_is_made(folder):
    fill(folder)
    assert held_blocks(folder / "data.mdb") >= CAPACITY
    assert held_blocks(folder / "uses.bin") >= (folder / "uses.bin").stat().st_size


def test_a_disk_too_small_for_the_capacity_is_an_error_with_a_way_out(folder):
    """RLIMIT_FSIZE stands in for the disk."""
    code = (
        "import resource, sys; from kvxfer.stores import open_store;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        f"open_store('lmdb://{folder}?capacity=2MiB')"
    )
    child = run_python(code)
    assert child.returncode == 1
    assert "StoreError" in child.stderr
    assert "give a smaller capacity or a folder on another disk" in child.stderr
    assert not (folder / "data.mdb").exists()
    assert not (folder / "new").exists()
    assert held(folder) == 0


def test_files_set_aside_make_room_for_a_new_one(folder, monkeypatch):
    fill(folder)
    os.truncate(folder / "data.mdb", 4096)
    allocate = lmdb_data.allocate

    def allocate_without_leftovers(fd, start, length):
        if aside(folder, "damaged"):
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, start, length)

    monkeypatch.setattr(lmdb_data, "allocate", allocate_without_leftovers)
    assert held(folder) == 0
    assert aside(folder, "damaged") == []


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (errno.ENOSPC, Outcome.NO_SPACE),
        (errno.EDQUOT, Outcome.NO_SPACE),
        (errno.EIO, Outcome.FAILED),
    ],
    ids=["full", "quota", "broken"],
)
def test_a_disk_that_fails_later_is_a_failed_put(folder, monkeypatch, caplog, code, outcome):
    store = open_in(folder)
    handle = store._reference.handle()
    handle.writer._warm_fd = handle.writer._warm_fd or os.open(folder / "data.mdb", os.O_RDWR)

    def refuse(fd, start, end):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(lmdb_writer, "write_zeros", refuse)
        assert set(store.put_from(KEYS, [memoryview(bytes(SIZE))] * len(KEYS))) == {outcome}
    assert os.strerror(code) in caplog.text
    assert store.exists(KEYS) == bytes(len(KEYS))
    put_all(store)
    store.close()
    assert held(folder) == len(KEYS)


def test_a_read_only_folder_is_an_error(tmp_path_factory):
    """Root may write anywhere, so the child becomes somebody else once Python has started."""
    user = 65_534 if os.geteuid() == 0 else os.geteuid()
    parent = Path(shutil.os.path.realpath(tmp_path_factory.mktemp("read_only")))
    code = (
        "import os; from kvxfer.stores import open_store, lmdb; folder = os.open('.', os.O_RDONLY);"
        f"os.geteuid() or os.setuid({user}); os.fchdir(folder);"
        "from kvxfer.stores.lmdb_options import LmdbOptions; from pathlib import Path;"
        "lmdb.LmdbStore(LmdbOptions(Path('/proc/self/cwd'), 1 << 20))"
    )
    folder = parent / "store"
    folder.mkdir(mode=0o500)
    os.chown(folder, user, -1)
    child = run_python(code, cwd=folder)
    assert child.returncode == 1
    assert "StoreError" in child.stderr
    assert "Permission denied" in child.stderr
    assert list(folder.iterdir()) == []


def run_python(code, cwd=None):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
