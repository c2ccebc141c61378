# SPDX-License-Identifier: Apache-2.0
"""Blocks of many layers through a real Mooncake pool over TCP, packed and as scatter lists.

``layers``: of a value; all cases move as many bytes, in segments of 16 KiB. The rival makes the
in-tree connector's calls, within what the transport's queue takes (see ratios_mooncake.py for what
happens past it). Packing is left out: bench_blocks.py has it.
"""

from __future__ import annotations

import pytest
from config import IS_SMOKE, KIB
from mooncake_sides import IMPLS, Blocks, open_side

SEGMENT_BYTES = 16 * KIB
NUM_SEGMENTS = 64 if IS_SMOKE else 960
LAYERS = [4] if IS_SMOKE else [1, 16, 80]
NUM_KEYS = 256 if IS_SMOKE else 4096
ROUNDS = 2 if IS_SMOKE else 12


@pytest.fixture
def side(impl, layers):
    blocks = Blocks(layers, NUM_SEGMENTS // layers, SEGMENT_BYTES)
    with open_side(impl, blocks) as side:
        blocks.fill()
        side.pack()
        yield side


@pytest.mark.benchmark(group="mooncake.put")
@pytest.mark.parametrize("layers", LAYERS, ids="layers={}".format)
@pytest.mark.parametrize("impl", IMPLS, ids="impl={}".format)
def bench_put(benchmark, side):
    benchmark.extra_info.update(bytes_moved=side.blocks.total_bytes)
    used = []

    def with_new_names():
        if used:
            side.remove(used[-1])
        used.append(side.new_names())
        return (used[-1],), {}

    assert benchmark.pedantic(side.put, setup=with_new_names, rounds=ROUNDS) == 0
    check_get(side, used[-1])


@pytest.mark.benchmark(group="mooncake.get")
@pytest.mark.parametrize("layers", LAYERS, ids="layers={}".format)
@pytest.mark.parametrize("impl", IMPLS, ids="impl={}".format)
def bench_get(benchmark, side):
    benchmark.extra_info.update(bytes_moved=side.blocks.total_bytes)
    names = side.new_names()
    assert side.put(names) == 0
    assert benchmark.pedantic(side.get, (names,), rounds=ROUNDS) == 0
    check_get(side, names)


@pytest.mark.benchmark(group="mooncake.exists")
@pytest.mark.parametrize("layers", [1], ids="layers={}".format)
@pytest.mark.parametrize("impl", IMPLS, ids="impl={}".format)
def bench_exists(benchmark, side):
    """Absent keys; the rival asks for all of them in one call."""
    names = side.new_names(NUM_KEYS)
    benchmark.extra_info.update(num_keys=NUM_KEYS)
    assert benchmark.pedantic(side.count_present, (names,), rounds=ROUNDS) == 0


def check_get(side, names):
    side.blocks.cache[:] = 0
    assert side.get(names) == 0
    side.unpack()
    assert side.blocks.is_whole()
