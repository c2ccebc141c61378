# SPDX-License-Identifier: Apache-2.0
"""Kinds of vLLM engines on one Mooncake master: kv_both, two ranks, hybrid, MultiConnector.

Every warm output is the cold one's, hits are as many as were stored, and a control shows that a
damaged load would change the outputs.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm")

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "integration" / "engines"), str(TESTS / "faults")]

import tamper_modes
from engine_checks import WatchedStore, assert_loads_matter, compute_again, compute_cold
from engine_families import FAMILIES, write_family
from engine_faults import one_thread_each
from engine_harness import EngineSettings
from engine_models import BLOCK_TOKENS, Prompts, write_tiny_llama
from mooncake_engines import Engines
from mooncake_servers import HOST, MIB, require_client, servers, wait_until

from kvxfer.stores import open_store
from kvxfer.stores.mooncake_native import bound_client

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NUM_BLOCKS = 4
OURS = "kvx1/"
PATIENT_S = 60
"""Bound of a lookup and of a request to the master, and the master's lease. On a busy machine of
two cores, to each of which vLLM binds one of two ranks, a request has taken up to 20 s."""
PATIENT = (("lookup_timeout_s", float(PATIENT_S)),)


class Site:
    """A pool, what looks into it, and engines that are started on it and end with the site."""

    def __init__(self, folder, pool):
        self.pool, self.folder = pool, folder
        self.store = WatchedStore(pool.master.uri())
        self._look = open_store(pool.master.uri())
        self.settings = EngineSettings(
            model=write_tiny_llama(folder / "model"),
            store=pool.master.uri(buffer="8MiB", timeout_s=PATIENT_S),
            extra=PATIENT,
        )
        self._prompts = Prompts(11)
        self.engines = Engines(folder)

    def draw(self):
        """Return two prompts of some blocks and a token."""
        return [self._prompts.draw(NUM_BLOCKS * BLOCK_TOKENS + 1) for _ in range(2)]

    def names(self):
        """Return what the master holds, by whatever connector."""
        url = f"http://{HOST}:{self.pool.master.metrics_port}/get_all_keys"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return set(answer.read().decode().split())

    def settle(self):
        """Wait until no value comes any more and all are whole: the master counts begun ones."""
        self.store.settle()
        wait_until(lambda: all(self._look.exists([name.encode() for name in self.names()])))

    def remove(self, names):
        """Remove values, leased or not."""
        assert self._look.remove([name.encode() for name in names]) == len(names)

    def close(self):
        self.engines.kill_all()
        self._look.close()
        self.store.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    require_client()
    folder = tmp_path_factory.mktemp("mooncake-kinds")
    with (
        pytest.MonkeyPatch.context() as patch,
        servers(folder, 128 * MIB, lease_ms=1000 * PATIENT_S) as pool,
    ):
        environment = one_thread_each()
        bound_client(PATIENT_S, environment)
        for name, value in environment.items():
            patch.setenv(name, value)
        site = Site(folder, pool)
        yield site
        site.close()


@pytest.fixture(scope="module")
def ranks(site):
    """Return engines of one rank and of two, role kv_both, that store two shards for each block."""
    settings = site.settings.but(extra=(*PATIENT, ("store_tp", 2)))
    return site.engines.start(settings, site.settings.but(tensor_parallel=2))


HITS = 2 * NUM_BLOCKS * BLOCK_TOKENS
VALUES = 2 * 2 * NUM_BLOCKS


def assert_warm_is_cold(site, engine):
    """Compute prompts, load them again, and check that a damaged load would not do; return both."""
    batch = site.draw()
    cold = compute_cold(engine, site.store, batch, num_values=VALUES)
    site.settle()
    warm = compute_again(engine, batch)
    assert warm.external_hits == HITS
    assert warm.outputs == cold.outputs
    assert_loads_matter(engine, batch, cold)
    return batch, cold


def test_an_engine_loads_what_it_saved_itself(site, ranks):
    assert_warm_is_cold(site, ranks[0])


def test_two_ranks_load_their_own_shards_and_those_that_one_rank_saved(site, ranks):
    one_rank, two_ranks = ranks
    batch, cold = assert_warm_is_cold(site, two_ranks)
    assert_loads_matter(two_ranks, batch, cold, mode=tamper_modes.SWAP_SHARDS)
    others = site.draw()
    other_cold = compute_cold(one_rank, site.store, others, num_values=VALUES)
    site.settle()
    warm = compute_again(two_ranks, others)
    assert warm.external_hits == HITS
    assert [o.tokens for o in warm.outputs] == [o.tokens for o in other_cold.outputs]
    for engine in ranks:
        engine.kill()


@pytest.fixture(scope="module")
def others(site):
    """Return an engine of a hybrid model, and one of two connectors on the same master.

    The latter has the in-tree connector, which is asked first, and kvxfer.
    """
    return site.engines.start(hybrid_settings(site), two_children_settings(site))


def test_a_hybrid_model_loads_attention_and_state(site, others):
    """One prompt at a time: the recurrent kernels round by the shape of the whole batch."""
    engine, _ = others
    batch = [site.draw()[0] * 2, site.draw()[0]]
    cold = [engine.generate([prompt]) for prompt in batch]
    site.settle()
    for prompt, before in zip(batch, cold, strict=True):
        warm = compute_again(engine, [prompt])
        assert warm.local_hits == before.external_hits == 0
        assert warm.external_hits >= (len(prompt) - 1) // 64 * 64
        assert warm.outputs == before.outputs
        assert_loads_matter(engine, [prompt], before)
    engine.kill()


def hybrid_settings(site):
    family = FAMILIES["recurrent_and_full"]
    (site.folder / "hybrid").mkdir()
    model = write_family(site.folder / "hybrid", family)
    return site.settings.but(model=model, besides=family.arguments)


def two_children_settings(site):
    config = site.folder / "mooncake.json"
    fields = {"metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "device_name": ""}
    fields |= {"mode": "standalone-store", "master_server_address": site.pool.master.address}
    fields |= {"global_segment_size": 0, "local_buffer_size": 8 * MIB}
    config.write_text(json.dumps(fields))
    environment = {
        "MOONCAKE_CONFIG_PATH": str(config),
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": HOST,
        "PYTHONHASHSEED": "0",
    }
    kvxfer = site.settings.but(extra=(*PATIENT, ("cache_prefix", "multi"))).arguments()
    children = [
        {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"},
        kvxfer["kv_transfer_config"],
    ]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    return site.settings.but(
        store=None,
        besides=(("kv_transfer_config", transfer),),
        environment=tuple(environment.items()),
    )


def test_child_that_is_not_chosen_loads_nothing_and_saves_everything(site, others):
    """Then it is chosen, because what the other one stored has gone, and loads all of it."""
    _, two_children = others
    batch, before = site.draw(), site.names()
    cold = two_children.generate(batch)
    site.settle()
    ours, theirs = by_connector(site.names() - before)
    assert len(ours) == 2 * NUM_BLOCKS
    assert theirs

    with two_children.tamper(tamper_modes.CORRUPT):  # what we load, had we loaded
        not_chosen = compute_again(two_children, batch)
    assert not_chosen.external_hits == HITS
    assert not_chosen.outputs == cold.outputs

    site.remove(theirs)
    chosen = compute_again(two_children, batch)
    assert chosen.external_hits == HITS
    assert chosen.outputs == cold.outputs
    site.settle()
    assert by_connector(site.names() - before) == (ours, theirs)  # saved by the other one again

    site.remove(theirs)
    assert_loads_matter(two_children, batch, cold)


def by_connector(names):
    """Return the names that kvxfer and that the in-tree connector gave."""
    ours = {name for name in names if name.startswith(OURS)}
    return ours, names - ours
