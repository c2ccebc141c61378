# SPDX-License-Identifier: Apache-2.0
"""kvxfer's connector over a store with the faults that a file asks for.

vLLM resolves it by module path in every process of an engine. ``KVXFER_TEST_FAULTS_FILE`` names the
file (see ``faulty_store.FileFaults``). The faults lie below everything that the worker puts around
the store that it opens.
"""

import os

from faulty_store import FaultyStore, FileFaults

import kvxfer.stores

open_store = kvxfer.stores.open_store
kvxfer.stores.open_store = lambda *args, **options: FaultyStore(
    open_store(*args, **options), FileFaults(os.environ["KVXFER_TEST_FAULTS_FILE"])
)

# After the store is replaced: the worker takes it by name.
from kvxfer.connector import KVXferConnector

__all__ = ["KVXferConnector"]
