# SPDX-License-Identifier: Apache-2.0
"""The parts of a cold-against-warm test: compute cold, compute warm, and the control."""

import time

import tamper_modes
from engine_models import BLOCK_TOKENS

from kvxfer.stores import open_store

SAVE_TIMEOUT_S = 60.0
QUIET_S = 0.5


class WatchedStore:
    """A store of one test or of all; ``uri`` is for engines, the rest looks in from outside."""

    def __init__(self, uri):
        self.uri = uri
        self._store = open_store(uri)

    def num_values(self):
        """Return how many values the store holds now."""
        return self._store.stats().num_values

    def wait_for(self, num_values):
        """Wait until the store holds so many values: saves go on after an output is out."""
        deadline = time.monotonic() + SAVE_TIMEOUT_S
        while (found := self.num_values()) < num_values:
            assert time.monotonic() < deadline, f"{found} values stored, {num_values} expected"
            time.sleep(0.01)

    def settle(self):
        """Wait until no value has come for a while: saves whose number a test cannot know."""
        found, since = -1, time.monotonic()
        while time.monotonic() < since + QUIET_S:
            if (now := self.num_values()) != found:
                found, since = now, time.monotonic()
            time.sleep(0.02)

    def close(self):
        self._store.close()


def watched_stores(tmp_path_factory):
    """Yield a function that makes an empty store, for a fixture; close them all afterwards."""
    stores = []

    def make():
        folder = tmp_path_factory.mktemp("store")
        stores.append(WatchedStore(f"lmdb://{folder}?capacity=256MiB"))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def whole_blocks(prompts):
    """Return how many blocks prompts without a common prefix fill."""
    return sum(len(prompt) // BLOCK_TOKENS for prompt in prompts)


def compute_cold(engine, store, prompts, *, num_values=None, **options):
    """Compute prompts that the store does not know; return once ``num_values`` more are stored.

    Default: one value for each block that a prompt fills.
    """
    expected = store.num_values() + (whole_blocks(prompts) if num_values is None else num_values)
    generation = engine.generate(prompts, **options)
    assert generation.external_hits == 0
    store.wait_for(expected)
    return generation


def compute_again(engine, prompts, **options):
    """Compute prompts with nothing in vLLM's own prefix cache, whatever the store holds."""
    engine.reset_local_cache()
    return engine.generate(prompts, **options)


def assert_loads_matter(engine, prompts, expected, mode=tamper_modes.CORRUPT, **options):
    """Check the control: with damaged loads, every prompt has other outputs than ``expected``."""
    with engine.tamper(mode):
        damaged = compute_again(engine, prompts, **options)
    engine.reset_local_cache()
    assert damaged.external_hits > 0
    for prompt, right, wrong in zip(prompts, expected.outputs, damaged.outputs, strict=True):
        assert right != wrong, (
            f"the outputs of {len(prompt)} tokens are as they were: nothing of the damaged load is "
            "in them, or the load failed (engine.log says so) and its tokens were computed"
        )
