# SPDX-License-Identifier: Apache-2.0
from typing_extensions import Buffer

import numpy as np
from numpy.typing import NDArray

def build_keys(
    prefix: bytes, hashes: Buffer, hash_bytes: int, hash_idx: NDArray[np.int32]
) -> list[bytes]: ...
def build_shard_keys(
    prefixes: tuple[bytes, ...], hashes: Buffer, hash_bytes: int, hash_idx: NDArray[np.int32]
) -> list[bytes]: ...
def pack_hashes(block_hashes: list[bytes], hash_idx: NDArray[np.int32]) -> bytes: ...
