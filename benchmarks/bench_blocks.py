# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter beside NumPy, torch and one memcpy; the plan and the items beside lists."""

import numpy as np
import pytest
from block_cases import GATHER, SCATTER, CopyCase
from config import SIZES

from kvxfer.blocks import BlockLayout, Region, plan

IMPL = pytest.mark.parametrize("impl", list(GATHER), ids="impl={}".format)
FRAGMENT = pytest.mark.parametrize("fragment", SIZES.fragment_bytes, ids="fragment={}".format)


@pytest.fixture(scope="module")
def case_of():
    """Return the case of a fragment size; only the last one made is kept, since pools are large."""
    made = {}

    def make(fragment, num_layers=1):
        if (fragment, num_layers) not in made:
            made.clear()
            made[fragment, num_layers] = CopyCase(fragment, num_layers)
            made[fragment, num_layers].prepare()
        return made[fragment, num_layers]

    return make


def run(benchmark, copies, impl, case):
    """Time one way to copy, then see that it copied; `memcpy` copies other blocks."""
    benchmark.extra_info.update(bytes_moved=case.bytes_moved)
    case.values[...] = 1
    benchmark.pedantic(copies[impl], args=(case,), rounds=SIZES.min_rounds, warmup_rounds=1)
    if impl != "memcpy":
        case.check()


@pytest.mark.benchmark(group="blocks.gather")
@FRAGMENT
@IMPL
def bench_gather(benchmark, impl, fragment, case_of):
    run(benchmark, GATHER, impl, case_of(fragment))


@pytest.mark.benchmark(group="blocks.scatter")
@FRAGMENT
@IMPL
def bench_scatter(benchmark, impl, fragment, case_of):
    run(benchmark, SCATTER, impl, case_of(fragment))


@pytest.mark.benchmark(group="blocks.gather_layers")
@IMPL
def bench_gather_layers(benchmark, impl, case_of):
    """Blocks of many layers: one value per block, which the rivals fill layer by layer."""
    fragment = 16384 if 16384 in SIZES.fragment_bytes else SIZES.fragment_bytes[-1]
    run(benchmark, GATHER, impl, case_of(fragment, SIZES.num_layers))


class Job:
    """The blocks of a prompt in a cache of many layers; planned, never copied, so never touched."""

    def __init__(self):
        page = np.empty((SIZES.num_hashes, SIZES.num_shards, SIZES.block_tokens, 256), np.uint8)
        # one memory stands for all layers: what a plan costs does not depend on its addresses
        self.regions = [
            Region(page, 0, f"layer{idx}", heads=(0, SIZES.num_shards))
            for idx in range(SIZES.num_layers)
        ]
        self.block_ids = np.random.default_rng(9).permutation(SIZES.num_hashes)
        self.layout = BlockLayout.from_regions(self.regions)
        self.layer_addresses = [region.view.ptr for region in self.regions]
        self.block_bytes = self.layout.value_bytes // SIZES.num_layers
        self.slot_ptr = 1 << 40


def items_of(job):
    """Return 16 bytes per block: all that a copy needs beside the plan."""
    return plan.make_items(
        job.block_ids,
        None,
        num_blocks=job.layout.num_blocks,
        class_id=0,
        value_ptr=job.slot_ptr,
        value_step=job.layout.value_bytes,
    )


def lists_of(job):
    """Return an address and a size per block and layer, as Python lists."""
    pairs = []
    for block_id in job.block_ids.tolist():
        addresses = [base + block_id * job.block_bytes for base in job.layer_addresses]
        pairs.append((addresses, [job.block_bytes] * len(addresses)))
    return pairs


def arrays_of(job):
    """Return an address and a size per block and layer, as NumPy arrays."""
    bases = np.asarray(job.layer_addresses, dtype=np.uint64)
    addresses = bases + (job.block_ids * job.block_bytes).astype(np.uint64)[:, None]
    return addresses, np.full(addresses.shape, job.block_bytes)


PLAN = {"kvxfer": items_of, "lists": lists_of, "numpy": arrays_of}


@pytest.fixture(scope="module")
def job():
    return Job()


@pytest.mark.benchmark(group="blocks.plan")
@pytest.mark.parametrize("impl", list(PLAN), ids="impl={}".format)
def bench_plan(benchmark, impl, job):
    """What each load or save of the prompt computes before its bytes move."""
    made = benchmark(PLAN[impl], job)
    assert len(made[0] if impl == "numpy" else made) == SIZES.num_hashes


@pytest.mark.benchmark(group="blocks.layout")
def bench_layout(benchmark, job):
    """What registration computes once, one class per head."""
    layout = benchmark(BlockLayout.from_regions, job.regions, head_shard=1)
    assert len(layout.classes) == SIZES.num_shards
