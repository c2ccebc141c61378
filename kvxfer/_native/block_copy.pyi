# SPDX-License-Identifier: Apache-2.0
import numpy as np
import numpy.typing as npt

_Table = npt.NDArray[np.void]

def copy_level() -> int: ...
def copy_items(
    runs: _Table,
    classes: _Table,
    items: _Table,
    num_blocks: int,
    to_value: bool,
    level: int,
) -> None: ...
def fill_items(
    block_ids: npt.NDArray[np.int64],
    mask: npt.NDArray[np.uint8] | None,
    num_blocks: int,
    class_id: int,
    value_ptr: int,
    value_step: int,
    out: _Table,
) -> int: ...
def find_repeat(items: _Table, seen: npt.NDArray[np.uint8]) -> int: ...
def check_items(
    items: _Table,
    classes: _Table,
    num_blocks: int,
    ranges: npt.NDArray[np.uint64],
) -> None: ...
def pack_job(
    items: _Table,
    classes: _Table,
    first_tile: npt.NDArray[np.int64],
    to_value: bool,
    counts: npt.NDArray[np.int64],
    words: _Table,
) -> tuple[int, int]: ...
def simulate_copy(
    runs: _Table,
    tiles: _Table,
    spans: _Table,
    items: _Table,
    to_value: bool,
    num_warps: int,
) -> int: ...
def simulate_kernel(
    parameters: npt.NDArray[np.uint8],
    to_value: bool,
    inlined: bool,
    num_ctas: int,
    threads: int,
) -> int: ...
def divide(n: int, multiplier: int, shift: int) -> int: ...
def struct_bytes() -> dict[str, int]: ...
def launch_struct_bytes() -> dict[str, int]: ...
