# SPDX-License-Identifier: Apache-2.0
"""Use an installed kvxfer where neither vLLM nor torch is: store, blocks, hits, command line.

``scripts/test_dist.py`` runs this with the Python of a new environment; it exits with an error at
the first thing that does not work, and imports nothing of the checkout that it lies in.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kvxfer


def main() -> None:
    """Try each part; the last line printed says what was tried."""
    here = Path(kvxfer.__file__)
    if "site-packages" not in here.parts:
        raise SystemExit(f"{here} is not an installed package")
    for package in ("vllm", "torch"):
        if importlib.util.find_spec(package):
            raise SystemExit(f"{package} is installed: this would prove nothing")
    with tempfile.TemporaryDirectory() as folder:
        copy_blocks_through_a_store(folder)
    find_a_hit()
    read_the_kernels(here.parent)
    run_the_command()
    print(f"kvxfer {kvxfer.__version__} works: store, blocks, hits, kernels' sources, command")


def copy_blocks_through_a_store(folder: str) -> None:
    """Gather two blocks, put and get them, scatter them into others; compare."""
    rng = np.random.default_rng(0)
    caches = [rng.random((8, 2, 4, 16), dtype=np.float32) for _ in range(3)]
    layout = kvxfer.BlockLayout.from_tensors(caches)
    packed = np.empty((2, layout.value_bytes), np.uint8)
    kvxfer.gather(layout, [1, 2], packed)
    keys = [b"first", b"second"]
    store = kvxfer.open_store(f"lmdb://{folder}/store?capacity=64MiB")
    try:
        store.put_from(keys, [row.data for row in packed])
        assert list(store.exists([*keys, b"third"])) == [True, True, False]
        found = np.zeros_like(packed)
        store.get_into(keys, [row.data for row in found])
    finally:
        store.close()
    kvxfer.scatter(layout, [5, 6], found)
    for cache in caches:
        np.testing.assert_array_equal(cache[[5, 6]], cache[[1, 2]])


def find_a_hit() -> None:
    """Look up a prompt of which the first three of four blocks are stored."""
    coordinator = kvxfer.Coordinator([kvxfer.CacheGroup("full", 16)], 16, 16)
    hashes = [bytes([idx]) * 32 for idx in range(4)]
    answer = coordinator.lookup(64, hashes, first_three)
    assert answer.hit_length == 48, answer


def first_three(asked: list[tuple[int, NDArray[np.int32]]]) -> list[NDArray[np.uint8]]:
    """Return 1 for each of the first three hashes: the existence call of a lookup."""
    return [(hash_idx < 3).astype(np.uint8) for _, hash_idx in asked]


def read_the_kernels(package: Path) -> None:
    """See that the sources for NVRTC are found in the package."""
    from kvxfer.blocks import cuda_sources  # noqa: PLC0415 (what comes before needs none of it)

    folder = cuda_sources.source_folder()
    assert package in folder.parents, folder
    assert "__global__" in cuda_sources.read_source(folder)


def run_the_command() -> None:
    """Without the extra ``cli`` the command names it."""
    command = Path(sys.executable).parent / "kvxfer"
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout
    assert "kvxfer[cli]" in done.stderr, done.stderr


if __name__ == "__main__":
    main()
