# SPDX-License-Identifier: Apache-2.0
"""Whether an LMDB store can be read: runs as a child process, because a damaged file may kill it.

``lmdb_data`` runs this file as a script, with the folder of a store that nobody has open. Exit
status 0: every key, row and record was read and the three databases agree. The values are not
read: damage inside one is not found here, which is why a store that was in use when the operating
system went down is not trusted at all.

The child imports nothing of kvxfer, so what both sides need stands here.
"""

from __future__ import annotations

import os
import resource
import struct
import sys
from typing import Any

import lmdb

DATABASES = (b"values", b"order", b"state")
COUNTERS_KEY = b"counters"
COST = struct.Struct("<Q")
"""Opens each row of ``order``, before the key, and the record of ``state``, which sums it up."""


def main() -> None:
    """Check the store in the folder ``sys.argv[1]``; exit with a message where it is damaged."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    env = lmdb.open(sys.argv[1], readonly=True, lock=False, create=False, max_dbs=len(DATABASES))
    file_bytes = os.stat(os.path.join(sys.argv[1], "data.mdb")).st_size
    num_pages = env.info()["last_pgno"] + 1
    if num_pages * env.stat()["psize"] > file_bytes:
        sys.exit(f"its {num_pages} pages are more than its {file_bytes} bytes hold")
    values, order, state = (env.open_db(name, create=False) for name in DATABASES)
    with env.begin() as txn:
        problem = find_problem(txn, values, order, state)
    if problem:
        sys.exit(problem)


def find_problem(txn: Any, values: Any, order: Any, state: Any) -> str:
    """Return how the databases of a snapshot disagree, ``""`` if they do not."""
    num_keys = sum(1 for _ in txn.cursor(db=values).iternext(keys=True, values=False))
    lookup = txn.cursor(db=values)
    num_rows = cost_bytes = 0
    for _, record in txn.cursor(db=order).iternext():
        num_rows += 1
        cost_bytes += COST.unpack_from(record)[0]
        if not lookup.set_key(record[COST.size :]):
            return f"order names the absent key {record[COST.size :]!r}"
    num_entries = txn.stat(values)["entries"]
    if not num_keys == num_rows == num_entries:
        return f"{num_keys} keys and {num_rows} rows were found, {num_entries} are counted"
    counters = txn.get(COUNTERS_KEY, db=state)
    used_bytes = COST.unpack_from(counters)[0] if counters is not None else 0
    if used_bytes != cost_bytes:
        return f"the values cost {cost_bytes} bytes, the record says {used_bytes}"
    return ""


if __name__ == "__main__":
    main()
