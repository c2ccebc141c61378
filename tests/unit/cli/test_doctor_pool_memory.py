# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cli.doctor.pool_memory import (
    EVICTS_AT,
    allocated_bytes,
    full_share,
    watermark_below,
)

# Distances between values of one size that lie one after another, of mooncake_master 0.3.13.
MEASURED = {
    1: 1,
    7: 7,
    16: 16,
    17: 18,
    100: 104,
    1000: 1024,
    4096: 4096,
    4097: 4608,
    5000: 5120,
    65_536: 65_536,
    65_537: 73_728,
    90_000: 90_112,
    131_072: 131_072,
    131_088: 147_456,
    155_648: 163_840,
    172_032: 180_224,
    983_040: 983_040,
    1_000_000: 1_048_576,
    1_048_577: 1_179_648,
}


@pytest.mark.parametrize(("value", "taken"), MEASURED.items())
def test_allocated_bytes_are_those_of_a_real_master(value, taken):
    assert allocated_bytes(value) == taken


@given(st.integers(1, 1 << 40))
def test_allocator_adds_less_than_an_eighth_and_adds_nothing_twice(value):
    taken = allocated_bytes(value)
    assert value <= taken < value * 9 / 8 + 1
    assert allocated_bytes(taken) == taken


@pytest.mark.parametrize(
    ("values", "share"), [([131_072], 1.0), ([131_088], 131_088 / 147_456), ([16, 17], 33 / 34)]
)
def test_full_share_is_what_the_master_counts_of_a_full_pool(values, share):
    assert full_share(values) == share


def test_watermark_is_below_the_share_at_which_the_pool_is_full():
    share = full_share([131_088])
    assert share < EVICTS_AT
    assert watermark_below(share) == 0.85  # with which every put of the measurement was stored
