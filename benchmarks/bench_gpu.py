# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter on a GPU beside torch, plain copies and batched copies; skipped without one.

Times are from before the launch to the end of its stream. `ratios_gpu.py` has the table by events.
"""

import pytest
from config import IS_SMOKE, KIB, SIZES
from gpu_cases import GpuCase, packing, reason_to_skip, selecting, unpacking

REASON = reason_to_skip()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

FRAGMENTS = (256, 4 * KIB) if IS_SMOKE else (128, 256, 1 * KIB, 4 * KIB, 16 * KIB, 128 * KIB)
FRAGMENT = pytest.mark.parametrize("fragment", FRAGMENTS, ids="fragment={}".format)


@pytest.fixture(scope="module")
def case_of():
    """Return the case of a fragment size; only the last one made is kept, since pools are large."""
    made = {}

    def make(fragment):
        if fragment not in made:
            made.clear()
            made[fragment] = GpuCase(fragment)
        return made[fragment]

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
