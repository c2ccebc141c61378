# SPDX-License-Identifier: Apache-2.0
"""Inside vLLM's MultiConnector: beside another connector, or beside one of our own."""

import pytest
from sched_configs import kvxfer_transfer
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvxfer.stores import open_store


class OtherHandshake(KVConnectorHandshakeMetadata):
    pass


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector that exchanges handshakes and never has a token."""

    requires_kv_delivery = False

    def get_handshake_metadata(self):
        return OtherHandshake()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def register_kv_caches(self, kv_caches):
        pass

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass


def multi(*children, policy="recompute"):
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": list(children)},
    }


OTHER = {
    "kv_connector": "OtherConnector",
    "kv_connector_module_path": OtherConnector.__module__,
    "kv_role": "kv_both",
}


@pytest.fixture
def stores(tmp_path):
    return [f"lmdb://{tmp_path}/{name}?capacity=32MiB" for name in ("first", "second")]


@pytest.fixture
def pair(make, stores):
    """Return an engine over two of our connectors, each with a store of its own."""

    def pair(order=(0, 1), **options):
        children = [kvxfer_transfer(stores[idx]) for idx in order]
        return make(transfer=multi(*children), **options)

    return pair


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_child_that_is_not_chosen_loads_nothing_and_saves_everything(
    pair, make, stores, prompt, windowed, num_ranks
):
    tokens = prompt(70)
    options = {"windowed": windowed, "num_ranks": num_ranks}
    make(stores[0], **options).serve("a", tokens)
    engine = pair(order=(1, 0), **options)  # the first child has nothing, the second is chosen
    engine.serve("a", tokens)
    engine.assert_generated("a")
    assert engine.loaded("a") == [(0, 64)]
    assert engine.reported["received", "a"] == 1
    engine.assert_empty()
    engine.assert_store_is_true(stores[1])
    later = make(stores[1], **options)
    later.serve("a", tokens)
    assert later.loaded("a") == [(0, 64)], "what the other child loaded was saved by this one"
    later.assert_generated("a")


def test_only_the_first_of_two_children_with_a_hit_loads(pair, make, stores, prompt):
    tokens = prompt(70)
    for uri in stores:
        make(uri).serve("a", tokens)
    engine = pair()
    engine.serve("a", tokens)
    assert engine.loaded("a") == [(0, 64)]
    assert [side.counts["tokens_ordered"] for side in engine.schedulers] == [64, 0]
    engine.assert_empty()


def test_failed_load_is_not_offered_again_by_that_child(pair, make, stores, prompt):
    tokens = prompt(70)
    make(stores[0]).serve("a", tokens)
    engine = pair()
    engine.ranks[0].switches.lost_values = (1,)
    engine.serve("a", tokens)
    assert engine.loaded("a") == [(0, 64)]
    assert [side.counts["loads_failed"] for side in engine.schedulers] == [1, 0]
    engine.assert_generated("a")
    engine.assert_empty()


def test_groups_of_several_kinds_stay_on(pair):
    engine = pair(windowed=True)
    assert isinstance(engine.vllm.connector, MultiConnector)
    assert KVConnectorFactory.supports_hma_config(engine.config.kv_transfer_config)


def test_stats_and_events_of_the_children_pass(pair, prompt):
    engine = pair()
    engine.serve("a", prompt(70))
    assert list(engine.vllm.connector.take_events()) == []
    assert engine.vllm.connector.get_kv_connector_stats() is None


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_a_connector_with_handshakes_of_its_own(make, stores, prompt, ours_first):
    children = [kvxfer_transfer(stores[0]), OTHER]
    children = children if ours_first else children[::-1]
    tokens = prompt(70)
    make(transfer=multi(*children)).serve("a", tokens)
    engine = make(transfer=multi(*children))
    engine.serve("a", tokens)
    assert engine.loaded("a") == [(0, 64)]
    engine.assert_generated("a")
    assert engine.vllm.reset_prefix_cache(reset_connector=True)
    assert num_values(stores[0]) == 0
    engine.assert_empty()


def test_reset_empties_the_stores_of_both_children(pair, stores, prompt):
    engine = pair(num_ranks=2)
    engine.serve("a", prompt(70))
    assert [num_values(uri) > 0 for uri in stores] == [True, True]
    assert engine.vllm.reset_prefix_cache(reset_connector=True)
    assert [num_values(uri) for uri in stores] == [0, 0]


def num_values(uri):
    store = open_store(uri)
    try:
        return store.stats().num_values
    finally:
        store.close()
