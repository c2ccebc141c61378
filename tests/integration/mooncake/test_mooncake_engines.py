# SPDX-License-Identifier: Apache-2.0
"""vLLM engines, each a process of its own, on one Mooncake master: a producer and a consumer.

The tests run in this order on the same two engines. Every warm output is the cold one's, and a
control shows that a damaged load would change it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

import tamper_modes
from engine_checks import WatchedStore, assert_loads_matter, compute_again, compute_cold
from engine_harness import EngineSettings
from engine_models import BLOCK_TOKENS, Prompts, write_tiny_llama
from mooncake_engines import Engines
from mooncake_servers import MIB, require_client, servers, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NUM_BLOCKS = 8
GENERATE_S = 30
SEGMENT_BYTES = 128 * MIB


class Site:
    """A pool, an engine that saves into it, one that only loads, and prompts for them."""

    def __init__(self, folder, pool):
        self.pool = pool
        self.store = WatchedStore(pool.master.uri())
        uri = pool.master.uri(buffer="8MiB", segment=0)
        settings = EngineSettings(model=write_tiny_llama(folder / "model"), store=uri)
        self._engines = Engines(folder)
        self.producer, self.consumer = self._engines.start(
            settings.but(role="kv_producer"), settings.but(role="kv_consumer")
        )
        self._prompts = Prompts(5)

    def draw(self):
        return [self._prompts.draw(NUM_BLOCKS // 2 * BLOCK_TOKENS + 1) for _ in range(2)]

    def shares(self):
        """Return whether one engine loads a new prompt of the other."""
        fresh = self.draw()
        cold = self.producer.generate(fresh)
        self.store.settle()
        warm = self.consumer.generate(fresh)
        assert warm.outputs == cold.outputs
        return warm.external_hits == NUM_BLOCKS * BLOCK_TOKENS

    def close(self):
        self._engines.kill_all()
        self.store.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    require_client()
    folder = tmp_path_factory.mktemp("mooncake-engines")
    with servers(folder, SEGMENT_BYTES, lease_ms=5000) as pool:
        site = Site(folder, pool)
        yield site
        site.close()


def test_a_consumer_loads_what_a_producer_saved(site):
    batch = site.draw()
    cold = compute_cold(site.producer, site.store, batch)
    warm = site.consumer.generate(batch)
    assert warm.external_hits == NUM_BLOCKS * BLOCK_TOKENS
    assert warm.outputs == cold.outputs
    assert_loads_matter(site.consumer, batch, cold)


def test_engines_go_on_without_a_master_and_share_again_when_it_is_back(site):
    batch = site.draw()
    compute_cold(site.producer, site.store, batch)
    site.pool.master.kill()
    began = time.monotonic()
    without = site.consumer.generate(batch)
    assert without.external_hits == 0
    assert site.producer.generate(site.draw()).external_hits == 0
    assert time.monotonic() - began < GENERATE_S
    site.pool.master.start()

    wait_until(site.shares, 60)
    assert compute_again(site.consumer, batch).outputs == without.outputs


@pytest.mark.parametrize("victim", ["master", "owner"])
def test_request_is_right_whose_load_is_under_way_when_a_server_dies(site, victim):
    batch = site.draw()
    cold = compute_cold(site.producer, site.store, batch)
    site.consumer.reset_local_cache()
    with site.consumer.tamper(tamper_modes.HOLD):
        names = [site.consumer.submit(prompt) for prompt in batch]
        site.consumer.step_until_load_is_held()
        {"master": site.pool.master, "owner": site.pool.owners[-1]}[victim].kill()
        saving = site.producer.generate(site.draw())  # whose save meets the same
    done = {}
    while len(done) < len(names):
        ended = site.consumer.step_for(GENERATE_S)
        assert ended, "a request does not end"
        done |= ended
    assert [done[name] for name in names] == cold.outputs
    assert saving.external_hits == 0
    if victim == "master":
        site.pool.master.start()
    else:
        site.pool.add_owner(SEGMENT_BYTES)
    wait_until(site.shares, 60)


def test_values_outlive_a_killed_producer_but_not_the_owner_of_their_segment(site):
    batch = site.draw()
    cold = compute_cold(site.producer, site.store, batch)
    site.producer.kill()
    warm = site.consumer.generate(batch)
    assert warm.external_hits == NUM_BLOCKS * BLOCK_TOKENS
    assert warm.outputs == cold.outputs
    site.pool.owners[-1].kill()
    began = time.monotonic()
    recomputed = compute_again(site.consumer, batch)  # the master still says that they are there
    assert time.monotonic() - began < GENERATE_S
    assert recomputed.outputs == cold.outputs
    wait_until(lambda: compute_again(site.consumer, batch).external_hits == 0, 60)
