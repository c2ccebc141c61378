# SPDX-License-Identifier: Apache-2.0
"""``kvxfer doctor``: what makes a deployment silently useless or fail late, each with the way out.

    run           run_doctor: all checks in order, shown as they come; the exit code
    findings      Check, Finding, Status: a named look, one sentence, how bad it is
    surroundings  what checks look at, each thing looked up once: install, arguments, model
    install       Python, native modules, torch, vLLM; GPU, CuPy, kernels
    settings      the transfer configuration, our options, block hashes, the lookup channel
    uris          store URIs
    lmdb          embedded stores: folder, disk, contents, one value
    mooncake      pools: client, master, segment, RDMA, one value
    pool_memory   what values take of a pool beside their bytes
    model         cache groups, shards, staging, sizes, waste

A check is a function from ``Surroundings`` to findings. Faults are planted one by one in
``tests/unit/cli/test_doctor.py``. What only vLLM and torch know comes from a process of its own
(``kvxfer.cli.model_process``).
"""

from kvxfer.cli.doctor.run import run_doctor
from kvxfer.cli.doctor.surroundings import Surroundings

__all__ = ["Surroundings", "run_doctor"]
