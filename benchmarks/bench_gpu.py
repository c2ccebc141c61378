# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter on a GPU beside torch, plain copies and batched copies; skipped without one.

Times are from before the launch to the end of its stream. `ratios_gpu.py` has the table by events.
"""

import pytest
from config import IS_SMOKE, KIB, MIB, SIZES
from gpu_cases import DEVICE, GpuCase, packing, reason_to_skip, selecting, unpacking

from kvxfer.blocks.cuda_dma import CopyEngine
from kvxfer.blocks.cuda_fragments import Fragments

REASON = reason_to_skip()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

FRAGMENTS = (256, 4 * KIB) if IS_SMOKE else (128, 256, 1 * KIB, 4 * KIB, 16 * KIB, 128 * KIB)
FRAGMENT = pytest.mark.parametrize("fragment", FRAGMENTS, ids="fragment={}".format)
LARGE_FRAGMENTS = (16 * KIB,) if IS_SMOKE else (16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB)
LARGE_FRAGMENT = pytest.mark.parametrize("fragment", LARGE_FRAGMENTS, ids="fragment={}".format)
SLOT_BYTES = 8 * MIB if IS_SMOKE else 64 * MIB


@pytest.fixture(scope="module")
def case_of():
    """Return the case of some sizes; only the last one made is kept, since pools are large."""
    made = {}

    def make(*sizes):
        if sizes not in made:
            made.clear()
            made[sizes] = GpuCase(*sizes)
        return made[sizes]

    return make


def time_run(benchmark, case, run):
    """Time a run up to the end of its stream."""

    def run_to_end():
        run()
        case.torch.cuda.synchronize()

    benchmark.extra_info.update(bytes_moved=case.bytes_moved)
    benchmark.pedantic(run_to_end, rounds=SIZES.min_rounds, warmup_rounds=2)


@pytest.mark.benchmark(group="gpu.gather")
@FRAGMENT
@pytest.mark.parametrize("impl", ["kvxfer", "torch", "copy"], ids="impl={}".format)
def bench_gpu_gather(benchmark, impl, fragment, case_of):
    case = case_of(fragment)
    case.values.zero_()
    runs = {"kvxfer": packing, "torch": selecting}
    copy = lambda: case.values.copy_(case.other)  # noqa: E731
    time_run(benchmark, case, runs[impl](case, case.values) if impl in runs else copy)
    if impl != "copy":
        case.check(case.values)


@pytest.mark.benchmark(group="gpu.scatter")
@FRAGMENT
@pytest.mark.parametrize("impl", ["kvxfer"], ids="impl={}".format)
def bench_gpu_scatter(benchmark, impl, fragment, case_of):
    case = case_of(fragment)
    time_run(benchmark, case, unpacking(case, case.other))
    case.check(case.other)


def by_engine(case, *, to_value):
    """Return a run by the copy engine alone, the making of its addresses included."""
    fragments, engine = Fragments(case.layout), CopyEngine(DEVICE)
    items, start = case.items(case.pinned), case.pinned.data_ptr()
    memory, stream = (start, start + case.bytes_moved), case.torch.cuda.Stream()
    return lambda: engine.copy(fragments.copies(items, memory, to_value=to_value), stream)


def copying(target, source):
    """Return one plain copy."""
    return lambda: target.copy_(source, non_blocking=True)


@pytest.mark.benchmark(group="gpu.staging")
@LARGE_FRAGMENT
@pytest.mark.parametrize("way", ["save", "load"], ids="way={}".format)
@pytest.mark.parametrize("impl", ["kernel", "engine", "copy"], ids="impl={}".format)
def bench_gpu_staging(benchmark, impl, way, fragment, case_of):
    """A slot's worth to or from pinned memory: by kernel and plain copy, or by the copy engine."""
    case = case_of(fragment, SLOT_BYTES)
    case.pinned.copy_(case.other)
    to_value = way == "save"
    kernel = (packing if to_value else unpacking)(case, case.values)
    copy = copying(*((case.pinned, case.values) if to_value else (case.values, case.pinned)))
    steps = (kernel, copy) if to_value else (copy, kernel)
    runs = {
        "kernel": lambda: [step() for step in steps],
        "engine": by_engine(case, to_value=to_value),
        "copy": copy,
    }
    time_run(benchmark, case, runs[impl])
    if impl != "copy":
        case.check(case.pinned)
