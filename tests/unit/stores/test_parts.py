# SPDX-License-Identifier: Apache-2.0
"""Parts of values: what they are told as, and what cannot be parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import UnsupportedError
from kvxfer.stores import open_store
from kvxfer.stores.parts import Parts, TransferMode

VALUES = st.lists(
    st.lists(st.tuples(st.integers(1, 2**47), st.integers(1, 2**40)), min_size=1, max_size=5),
    max_size=6,
)


def parts_of(values):
    flat = [part for value in values for part in value]
    ptrs, sizes = np.array(flat, np.int64).reshape(-1, 2).T
    return Parts(ptrs, sizes, np.array(list(map(len, values)), np.int64))


@given(VALUES)
def test_parts_are_told_value_by_value(values):
    parts = parts_of(values)
    parts.check(len(values), most_parts=5)
    ptrs, sizes = parts.by_value()
    assert ptrs == [[ptr for ptr, _ in value] for value in values]
    assert sizes == [tuple(size for _, size in value) for value in values]
    assert parts.value_bytes().tolist() == list(map(sum, sizes))


@pytest.mark.parametrize("name", ["ptrs", "sizes", "counts"])
@pytest.mark.parametrize("column", [np.ones(1, np.uint64), np.ones((1, 1), np.int64)])
def test_columns_of_other_types_are_told(name, column):
    columns = {"ptrs": np.ones(1, np.int64), "sizes": np.ones(1, np.int64)}
    columns["counts"] = np.ones(1, np.int64)
    parts = Parts(**columns | {name: column})
    with pytest.raises(ValueError, match=f"{name} is .*, not int64 of 1"):
        parts.check(1, most_parts=1)


@pytest.mark.parametrize(
    ("counts", "num_keys", "most_parts", "message"),
    [
        ([2], 2, 9, "2 keys, but parts of 1 values"),
        ([3], 1, 9, "2 addresses and 2 sizes, their counts say 3"),
        ([2, 0], 2, 9, "value 1 has 0 parts, not 1 to 9"),
        ([2], 1, 1, "value 0 has 2 parts, not 1 to 1"),
    ],
)
def test_what_cannot_be_parts_is_told(counts, num_keys, most_parts, message):
    parts = Parts(np.array([16, 32]), np.array([1, 2]), np.array(counts))
    with pytest.raises(ValueError, match=message):
        parts.check(num_keys, most_parts)


def test_a_store_without_the_capability_says_so(tmp_path):
    store = open_store(f"lmdb://{tmp_path}/store?capacity=8MiB")
    parts = parts_of([[(16, 1)]])
    assert (store.transfer_mode, store.most_parts) == (TransferMode.PACKED, 0)
    for call in (store.get_parts, store.put_parts):
        with pytest.raises(UnsupportedError, match="takes no parts of values"):
            call([b"k"], parts)
    store.close()
