# SPDX-License-Identifier: Apache-2.0
"""A scripted run of a real engine, scraped and read by Prometheus' own parser: exact counters."""

import shutil
import tempfile

import pytest
import zmq
from engine_checks import compute_again, compute_cold
from engine_models import BLOCK_TOKENS, TINY

pytest.importorskip("vllm")
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from kvxfer.observe.definitions import METRICS, PREFIX, Kind

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCKS = 4
LONG = BLOCKS * BLOCK_TOKENS + 1
HIT = BLOCKS * BLOCK_TOKENS
SHORT = BLOCK_TOKENS - 1
MOST_FLUSHES = 10


def exact_counters(num_ranks, num_flushes):
    """Return every counter that is not 0 after a prompt of 4 blocks, cold and then warm.

    ``num_flushes``: prompts below one block, each of which brings the steps that tell the rest.
    """
    num_values = num_ranks * BLOCKS
    num_bytes = BLOCKS * BLOCK_TOKENS * TINY.kv_token_bytes  # halves, on two ranks
    return {
        ("lookups", "hit"): 1,
        ("lookups", "miss"): 1,
        ("wanted_tokens",): 2 * LONG + num_flushes * SHORT,
        ("hit_tokens",): HIT,
        ("missed_tokens", "not_stored"): HIT,
        ("missed_tokens", "last_block"): 2,
        ("missed_tokens", "too_short"): num_flushes * SHORT,
        ("jobs", "load", "done"): num_ranks,
        ("jobs", "save", "done"): num_ranks,
        # Asked by the two lookups, of all shards, and before the save, by each rank of its own.
        ("store_keys", "exists", "missing"): 2 * num_values,
        ("store_keys", "exists", "found"): num_values,
        ("store_keys", "put", "ok"): num_values,
        ("store_keys", "get", "ok"): num_values,
        ("store_bytes", "put"): num_bytes,
        ("store_bytes", "get"): num_bytes,
    }


def exact_histogram_counts(num_ranks):
    """Return the number of observations of every histogram that has any."""
    return {
        ("lookup_seconds",): 2,
        ("job_seconds", "load"): num_ranks,
        ("job_seconds", "save"): num_ranks,
        ("store_call_seconds", "exists"): 2 + num_ranks,
        ("store_call_seconds", "put"): num_ranks,
        ("store_call_seconds", "get"): num_ranks,
    }


class Scrape:
    """Our samples of one scrape; a series is its metric's name and the values of our labels."""

    def __init__(self, text):
        self.samples = {}
        self.types = {}
        for family in text_string_to_metric_families(text):
            if family.name.startswith(PREFIX) and not family.name.endswith("_created"):
                self.types[family.name.removeprefix(PREFIX)] = family.type
                for sample in family.samples:
                    self.samples[sample.name, frozenset(sample.labels.items())] = sample

    def of(self, metric, ending):
        """Return {series: value} of one metric's samples, those that are 0 too."""
        found = {}
        for sample in self.samples.values():
            if sample.name == metric.full_name + ending:
                assert sample.labels["engine"] == "0"
                assert sample.labels["model_name"]
                values = (sample.labels[label] for label in metric.labels)
                found[(metric.name, *values)] = sample.value
        return found

    def counters(self):
        """Return every counter that is not 0, but for what the store tells of itself."""
        return self._not_0(Kind.COUNTER, "_total")

    def histogram_counts(self):
        return self._not_0(Kind.HISTOGRAM, "_count")

    def _not_0(self, kind, ending):
        metrics = [m for m in METRICS if m.kind is kind and m.name != "store_events"]
        return {k: v for m in metrics for k, v in self.of(m, ending).items() if v}


def run_script(engine, store, prompt, prompts, num_ranks):
    """Compute a prompt cold and warm, and then short ones until everything was told."""
    compute_cold(engine, store, [prompt], num_values=num_ranks * BLOCKS)
    warm = compute_again(engine, [prompt])
    assert warm.external_hits == HIT
    for num_flushes in range(1, MOST_FLUSHES):
        engine.generate([prompts.draw(SHORT)], max_tokens=2)
        scrape = Scrape(engine.scrape())
        if scrape.counters() == exact_counters(num_ranks, num_flushes):
            break
    return scrape, num_flushes


@pytest.mark.parametrize("core_process", [False, True], ids="core_process={}".format)
def test_counters_of_a_scripted_run_are_exact(
    engine_pool, settings, new_store, prompts, core_process
):
    store = new_store()
    own = settings.but(store=store.uri, core_process=core_process)
    check_counters(engine_pool.get(own), store, prompts.draw(LONG), prompts, num_ranks=1)
    engine_pool.retire(own)


@pytest.mark.parametrize("ranks", ["tensor_parallel", "pipeline_parallel"])
def test_two_ranks_count_their_own_and_tell_of_each_block_once(
    engine_pool, settings, new_store, prompts, router, ranks
):
    store, prompt = new_store(), prompts.draw(LONG)
    publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": router.endpoint}
    own = settings.but(
        store=store.uri, besides=(("kv_events_config", tuple(publish.items())),), **{ranks: 2}
    )
    check_counters(engine_pool.get(own), store, prompt, prompts, num_ranks=2)
    engine_pool.retire(own)
    events = router.stored()
    ours = [event for event in events if event.medium == "LMDB"]
    blocks = [prompt[at : at + BLOCK_TOKENS] for at in range(0, HIT, BLOCK_TOKENS)]
    assert [event.token_ids for event in ours] == blocks
    hashes = [h for event in events if event.medium == "GPU" for h in event.block_hashes]
    assert [event.block_hashes[0] for event in ours] == hashes[:BLOCKS]
    assert [event.parent_block_hash for event in ours] == [None, *hashes[: BLOCKS - 1]]


class Router:
    """Takes what an engine publishes; it is there while the engine starts, so nothing is lost."""

    def __init__(self, folder):
        self.endpoint = f"ipc://{folder}/events"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(self.endpoint)

    def stored(self):
        """Return the ``BlockStored`` events that have come so far."""
        events = []
        while self._socket.poll(1000):
            _, _, payload = self._socket.recv_multipart()
            events += msgspec.msgpack.decode(payload, type=KVEventBatch).events
        return [event for event in events if isinstance(event, BlockStored)]

    def close(self):
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def router():
    folder = tempfile.mkdtemp(prefix="kvx")  # a socket's path has room for few characters
    router = Router(folder)
    yield router
    router.close()
    shutil.rmtree(folder)


def check_counters(engine, store, prompt, prompts, num_ranks):
    """Run the script on a new engine and an empty store, and check every number."""
    before = Scrape(engine.scrape())
    assert before.counters() == {}
    assert before.types == {metric.name: metric.kind.value for metric in METRICS}
    scrape, num_flushes = run_script(engine, store, prompt, prompts, num_ranks)
    assert scrape.counters() == exact_counters(num_ranks, num_flushes)
    assert scrape.histogram_counts() == exact_histogram_counts(num_ranks)
    assert_sums_are_times(scrape)
    assert_gauges_tell_of_the_store(scrape, store)


class Children(dict):
    """The transfer settings of a MultiConnector, hashable as settings of engines are."""

    def __init__(self, settings, stores):
        child = settings.arguments()["kv_transfer_config"]
        children = [child | {"kv_connector_extra_config": {"store": uri}} for uri in stores]
        super().__init__(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": children},
        )

    def __hash__(self):
        return id(self)


def test_children_of_a_multi_connector_add_up(engine_pool, settings, new_store, prompts):
    stores = [new_store(), new_store()]
    transfer = Children(settings, [store.uri for store in stores])
    own = settings.but(store=None, besides=(("kv_transfer_config", transfer),))
    engine = engine_pool.get(own)
    prompt = prompts.draw(LONG)
    compute_cold(engine, stores[0], [prompt])
    stores[1].wait_for(BLOCKS)
    assert compute_again(engine, [prompt]).external_hits == HIT
    engine.generate([prompts.draw(SHORT)], max_tokens=2)
    found = Scrape(engine.scrape()).counters()
    wanted = exact_counters(1, 1)
    for series in (("hit_tokens",), ("store_keys", "get", "ok"), ("jobs", "load", "done")):
        assert found[series] == wanted[series], "one child loads"
    for series in (("store_keys", "put", "ok"), ("store_bytes", "put"), ("jobs", "save", "done")):
        assert found[series] == 2 * wanted[series], "both children save"
    engine_pool.retire(own)


def assert_sums_are_times(scrape):
    """Check that every histogram with observations took some time, and less than a test."""
    for metric in (m for m in METRICS if m.kind is Kind.HISTOGRAM):
        counts = scrape.of(metric, "_count")
        for series, total_s in scrape.of(metric, "_sum").items():
            assert (0 < total_s < 600) == (counts[series] > 0), series


def assert_gauges_tell_of_the_store(scrape, store):
    gauges = {}
    for metric in (m for m in METRICS if m.kind is Kind.GAUGE):
        gauges |= scrape.of(metric, "")
    assert 0 < gauges["store_values",] <= store.num_values()  # the other rank may put later
    assert 0 < gauges["store_used_bytes",] < gauges["store_capacity_bytes",]
    assert gauges["pinned_blocks",] == 0
    assert {v for k, v in gauges.items() if k[0] in ("queued_jobs", "in_flight_bytes")} == {0}
