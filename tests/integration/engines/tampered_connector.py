# SPDX-License-Identifier: Apache-2.0
"""kvxfer's connector over a store whose loads the tests can damage, exchange or hold.

vLLM resolves it by module path in every process of an engine. What a load does is read, at each
call, from the file that ``KVXFER_TEST_TAMPER_FILE`` names: a mode of ``tamper_modes``, or nothing.
"""

import os
import re
import time
from pathlib import Path

from tamper_modes import CORRUPT, HOLD, SWAP_SHARDS, held_file

import kvxfer.stores
from kvxfer.cli.store_tap import TappedStore, halves_exchanged
from kvxfer.stores.base import Outcome

HOLD_LIMIT_S = 60.0
TAMPER_FILE = Path(os.environ["KVXFER_TEST_TAMPER_FILE"])
OTHER_SHARD = {b"/h0-1/": b"/h1-2/", b"/h1-2/": b"/h0-1/"}


class TamperedStore(TappedStore):
    def get_into(self, keys, targets):
        mode = TAMPER_FILE.read_text()
        if mode == HOLD:
            _wait_for_another_mode()
        if mode == SWAP_SHARDS:
            keys = [_other_shard(key) for key in keys]
        outcomes = super().get_into(keys, targets)
        if mode == CORRUPT:
            for target, outcome in zip(targets, outcomes, strict=True):
                if outcome is Outcome.OK:
                    target.cast("B")[:] = halves_exchanged(target)
        return outcomes


def _wait_for_another_mode():
    held_file(TAMPER_FILE).touch()
    deadline = time.monotonic() + HOLD_LIMIT_S
    while TAMPER_FILE.read_text() == HOLD and time.monotonic() < deadline:
        time.sleep(0.005)


def _other_shard(key):
    swapped, count = re.subn(rb"/h(0-1|1-2)/", lambda match: OTHER_SHARD[match[0]], key)
    assert count == 1, key
    return swapped


open_store = kvxfer.stores.open_store
kvxfer.stores.open_store = lambda uri: TamperedStore(open_store(uri))

# After the store is replaced: the worker takes it by name.
from kvxfer.connector import KVXferConnector

__all__ = ["KVXferConnector"]
