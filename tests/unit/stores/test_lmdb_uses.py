# SPDX-License-Identifier: Apache-2.0
"""The shared table of leases and last uses."""

from __future__ import annotations

import pytest

from kvxfer.stores.lmdb_uses import HEADER_BYTES, SLOT_BYTES, UseTable, make_table, table_bytes


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "uses.bin"
    make_table(path, table_bytes(1 << 20))
    return path


@pytest.mark.parametrize(
    ("file_bytes", "num_slots"),
    [(1 << 20, 1 << 12), (64 << 20, 1 << 12), ((64 << 20) + 16384, 1 << 13), (8 << 30, 1 << 19)],
)
def test_the_table_has_a_power_of_two_of_slots(file_bytes, num_slots):
    assert table_bytes(file_bytes) == HEADER_BYTES + num_slots * SLOT_BYTES


def test_leases_and_uses_are_seen_through_another_mapping(path):
    one, other = UseTable(path), UseTable(path)
    keys = [b"a", b"b"]
    one.lease(one.slots(keys), 100.0)
    one.note_use(one.slots(keys[:1]), 7)
    assert [other.is_leased(other.slot(key), 99.0) for key in (b"a", b"b", b"c")] == [
        True,
        True,
        False,
    ]
    assert not other.is_leased(other.slot(b"a"), 100.0)
    assert [other.last_use(other.slot(key)) for key in keys] == [7, 0]


def test_slots_of_a_batch_are_those_of_its_keys(path):
    uses = UseTable(path)
    keys = [b"%d" % idx for idx in range(100)]
    assert uses.slots(keys).tolist() == [uses.slot(key) for key in keys]
    assert len(set(uses.slots(keys).tolist())) > 90


def test_a_shorter_lease_does_not_end_a_longer_one(path):
    uses = UseTable(path)
    uses.lease(uses.slots([b"a"]), 100.0)
    uses.lease(uses.slots([b"a"]), 50.0)
    assert uses.is_leased(uses.slot(b"a"), 99.0)


def test_the_epoch_is_odd_during_an_eviction_even_if_it_raises(path):
    uses = UseTable(path)
    with uses.evicting():
        assert UseTable(path).epoch == 1
    assert uses.epoch == 2
    with pytest.raises(OSError, match="disk"), uses.evicting():
        raise OSError("disk")
    assert uses.epoch == 4


def test_the_epoch_of_a_killed_evictor_is_mended(path):
    uses = UseTable(path)
    killed = uses.evicting()
    killed.__enter__()
    assert uses.epoch == 1
    uses.mend()
    assert uses.epoch == 2
    uses.mend()
    assert uses.epoch == 2
    killed_again = uses.evicting()
    killed_again.__enter__()
    with uses.evicting():
        assert uses.epoch == 5
    assert uses.epoch == 6


def test_make_table_starts_empty(path):
    UseTable(path).lease(UseTable(path).slots([b"a"]), 100.0)
    UseTable(path).warmed_bytes = 4096
    make_table(path, table_bytes(1 << 20))
    uses = UseTable(path)
    assert not uses.is_leased(uses.slot(b"a"), 0.0)
    assert uses.warmed_bytes == uses.epoch == 0
