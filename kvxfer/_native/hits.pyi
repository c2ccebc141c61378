# SPDX-License-Identifier: Apache-2.0
import numpy as np
from numpy.typing import NDArray

UNKNOWN: int
ABSENT: int
PRESENT: int

def find_full(
    states: NDArray[np.uint8],
    max_tokens: int,
    block_tokens: int,
    hash_tokens: int,
    align_tokens: int,
    drop_eagle: bool,
) -> tuple[int, int, int, int]: ...
def find_sliding_window(
    states: NDArray[np.uint8],
    max_tokens: int,
    block_tokens: int,
    hash_tokens: int,
    align_tokens: int,
    drop_eagle: bool,
    window_tokens: int,
) -> tuple[int, int, int, int]: ...
def find_chunked_local(
    states: NDArray[np.uint8],
    max_tokens: int,
    block_tokens: int,
    hash_tokens: int,
    chunk_tokens: int,
) -> tuple[int, int, int, int]: ...
def find_mamba(
    states: NDArray[np.uint8],
    max_tokens: int,
    block_tokens: int,
    hash_tokens: int,
    align_tokens: int,
) -> tuple[int, int, int, int]: ...
def count_unknown(states: NDArray[np.uint8], hash_idx: NDArray[np.int32]) -> int: ...
def note_answers(
    states: NDArray[np.uint8], hash_idx: NDArray[np.int32], answers: NDArray[np.uint8]
) -> None: ...
def join_shards(flags: NDArray[np.uint8], whole: NDArray[np.uint8]) -> int: ...
