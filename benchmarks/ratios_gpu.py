# SPDX-License-Identifier: Apache-2.0
"""Print how copies on this GPU compare with its own plain copies, and with other kernels.

    python benchmarks/ratios_gpu.py

D is one copy of the same bytes within device memory, P one copy to pinned host memory; payload
counts once. Every cell is GB/s and the share of D or P, both from the same pairs: median of
interleaved runs, timed by events. A result is checked before it is timed. Without a GPU it says so.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
from config import IS_SMOKE, KIB, MIB
from gpu_cases import (
    DEVICE,
    GpuCase,
    Run,
    packing,
    reason_to_skip,
    selecting,
    unpacking,
)
from gpu_peers import INTERFACE_ERRORS, PeerError, batched_copies, lmcache, sglang

from kvxfer.blocks import ITEM_DTYPE, BlockLayout, Region, cuda, cuda_job, cuda_kernels

NUM_PAIRS = 3 if IS_SMOKE else 11
FRAGMENTS = (128, 256, 1 * KIB, 4 * KIB, 16 * KIB, 128 * KIB)
HOST_BYTES = 4 * MIB if IS_SMOKE else 256 * MIB
BATCH_BYTES = 4 * MIB if IS_SMOKE else 64 * MIB
MATMUL_SIZE = 512 if IS_SMOKE else 8192
NUM_MATMULS = 4 if IS_SMOKE else 40
CHUNK_BYTES = 4 * MIB if IS_SMOKE else 64 * MIB


def main() -> None:
    if reason := reason_to_skip():
        print(f"ratios_gpu: nothing measured, {reason}")
        return
    import torch

    torch.cuda.set_device(DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # batched copies refuse the default stream
        _print_machine(torch)
        left_out = _print_device(stream)
        left_out += _print_host(stream)
        _print_submission(torch)
        _print_matmul(torch, stream)
    for reason in sorted(set(left_out)):
        print(f"left out: {reason}")


def _print_machine(torch: Any) -> None:
    import cupy

    properties = torch.cuda.get_device_properties(DEVICE)
    print(
        f"{properties.name}, {properties.multi_processor_count} multiprocessors, torch "
        f"{torch.__version__}, CuPy {cupy.__version__}, kernels from "
        f"{cuda_kernels.load(0).origin}, {NUM_PAIRS} pairs"
    )


def _print_device(stream: Any) -> list[str]:
    """Print packing and unpacking in device memory; return who was left out and why."""
    print("\nin device memory: GB/s, share of D")
    names = ("pack", "unpack", "pack, 8 CTAs", "index_select", "SGLang, 8 CTAs", "LMCache")
    _print_head("fragment", (*names, "D GB/s"))
    left_out: list[str] = []
    for fragment in FRAGMENTS:
        case = GpuCase(fragment)
        copy = _copying(case.values, case.other)
        cells, rates = [], []
        for name in names:
            try:
                run = _device_run(name, case)
                case.values.zero_()
                run()
                case.check(case.other if name == "unpack" else case.values)
                rate, share, reference = _measure(run, copy, case.bytes_moved, stream)
                cells.append(f"{rate:.0f} {share:.2f}")
                rates.append(reference)
            except PeerError as error:
                left_out.append(str(error))
                cells.append("-")
        _print_row(fragment, (*cells, f"{statistics.median(rates):.0f}"))
        del case, copy, run
    return left_out


def _device_run(name: str, case: GpuCase) -> Run:
    num_ctas = cuda_job.BACKGROUND_CTAS
    if name.startswith("SGLang"):
        return _guarded(sglang(case, case.values, num_ctas), name)
    if name == "LMCache":
        return _guarded(lmcache(case, case.values), name)
    if name == "index_select":
        return selecting(case, case.values)
    if name == "unpack":
        return unpacking(case, case.other)
    return packing(case, case.values, "background" if "CTAs" in name else "full")


def _guarded(run: Run, name: str) -> Run:
    """Return a peer's run whose own errors are a `PeerError`: it only leaves a cell empty."""

    def guarded() -> None:
        try:
            run()
        except INTERFACE_ERRORS as error:
            raise PeerError(f"{name}: {error}") from error

    return guarded


def _print_host(stream: Any) -> list[str]:
    """Print what reaches pinned host memory, and what comes from there."""
    print("\nto and from pinned host memory: GB/s, share of P of that direction")
    names = ("kernel out", "pack + DMA out", "batch out", "DMA + unpack in", "batch in")
    _print_head("fragment", (*names, "P out", "P in"))
    left_out: list[str] = []
    for fragment in FRAGMENTS:
        case = GpuCase(fragment, HOST_BYTES)
        out, into = _copying(case.pinned, case.other), _copying(case.other, case.pinned)
        cells, rates = [], {True: [0.0], False: [0.0]}
        for name in names:
            is_out = name.endswith("out")
            own = GpuCase(fragment, BATCH_BYTES) if name.startswith("batch") else case
            try:
                run = _host_run(name, own, stream)
                run()
                own.check(own.pinned)
                rate, share, reference = _measure(
                    run, out if is_out else into, own.bytes_moved, stream, case.bytes_moved
                )
                cells.append(f"{rate:.1f} {share:.2f}")
                rates[is_out].append(reference)
            except PeerError as error:
                left_out.append(str(error))
                cells.append("-")
        _print_row(fragment, (*cells, *(f"{max(rates[way]):.1f}" for way in (True, False))))
    return left_out


def _host_run(name: str, case: GpuCase, stream: Any) -> Run:
    if name == "kernel out":
        return packing(case, case.pinned)
    if name == "pack + DMA out":
        pack, copy = packing(case, case.values), _copying(case.pinned, case.values)
        return lambda: (pack(), copy())
    if name == "DMA + unpack in":
        copy, unpack = _copying(case.values, case.pinned), unpacking(case, case.values)
        return lambda: (copy(), unpack())
    pages = case.rows.data_ptr() + case.row_ids.cpu().numpy().astype(np.uint64) * case.fragment
    values = case.pinned.data_ptr() + np.arange(len(pages), dtype=np.uint64) * case.fragment
    ways = (pages, values) if name == "batch out" else (values, pages)
    return batched_copies(
        *(np.ascontiguousarray(way, np.uint64) for way in ways), case.fragment, stream
    )


def _print_submission(torch: Any) -> None:
    """Print the CPU time of one launch for 1,000 blocks of 160 regions."""
    num_blocks = 1000
    pool = torch.zeros((160, num_blocks, 16, 64), dtype=torch.uint8, device=DEVICE)
    # odd distances between regions, so that they do not merge into one
    axes = ("block", "token", "content")
    regions = [Region(pool[idx, :, : 16 - idx % 2], 0, f"r{idx}", axes) for idx in range(160)]
    layout = BlockLayout.from_regions(regions)
    copies = cuda.CudaCopies(layout)
    values = torch.empty((num_blocks, layout.value_bytes), dtype=torch.uint8, device=DEVICE)
    items = np.zeros(num_blocks, dtype=ITEM_DTYPE)
    items["block_id"] = np.random.default_rng(1).permutation(num_blocks)
    items["value_ptr"] = values.data_ptr() + np.arange(num_blocks) * values.shape[1]
    times = []
    for _ in range(10 * NUM_PAIRS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        copies.gather_items(items, values)
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    cpu_us = statistics.median(times) * 1e6
    print(f"\nsubmission of 1,000 blocks x 160 regions: {cpu_us:.0f} us of CPU")


def _print_matmul(torch: Any, stream: Any) -> None:
    """Print what saving with the background quota costs a loop of matmuls beside it."""
    case = GpuCase(4 * KIB, CHUNK_BYTES)
    pack, copy = packing(case, case.values, "background"), _copying(case.pinned, case.values)
    side = torch.cuda.Stream()
    left = torch.randn((MATMUL_SIZE, MATMUL_SIZE), device=DEVICE).bfloat16()

    def multiply() -> None:
        for _ in range(NUM_MATMULS):
            torch.mm(left, left)

    multiply()
    alone = _milliseconds(multiply, stream)
    num_chunks = max(int(alone * 1e-3 * 60e9 / case.bytes_moved), 1)
    pack()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        begin.record()
        for _ in range(num_chunks):
            pack()
            copy()
        end.record()
    beside = _milliseconds(multiply, stream)
    torch.cuda.synchronize()
    rate = num_chunks * case.bytes_moved / begin.elapsed_time(end) / 1e6
    print(
        f"{NUM_MATMULS} bf16 matmuls of {MATMUL_SIZE}^3: {alone:.1f} ms alone, {beside:.1f} ms "
        f"({beside / alone - 1:+.1%}) while {num_chunks} chunks were saved at {rate:.1f} GB/s"
    )


def _copying(target: Any, source: Any) -> Run:
    return lambda: target.copy_(source, non_blocking=True)


def _measure(
    run: Run, reference: Run, num_bytes: int, stream: Any, reference_bytes: int | None = None
) -> tuple[float, float, float]:
    """Return the rate of ``run`` in GB/s, its share of the reference's rate, and that rate."""
    rates, shares, references = [], [], []
    for run_once in (reference, run, run):
        run_once()
    for _ in range(NUM_PAIRS):
        other = (reference_bytes or num_bytes) / _milliseconds(reference, stream) / 1e6
        own = num_bytes / _milliseconds(run, stream) / 1e6
        rates.append(own)
        references.append(other)
        shares.append(own / other)
    return tuple(map(statistics.median, (rates, shares, references)))  # type: ignore[return-value]


def _milliseconds(run: Run, stream: Any) -> float:
    """Return the time between two events on ``stream`` around a run."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return max(float(begin.elapsed_time(end)), 1e-6)


def _print_head(first: str, names: tuple[str, ...]) -> None:
    print(f"{first:>10} " + " ".join(f"{name:>16}" for name in names))


def _print_row(fragment: int, cells: tuple[str, ...]) -> None:
    print(f"{fragment:>10} " + " ".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    sys.exit(main())
