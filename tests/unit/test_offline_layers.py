# SPDX-License-Identifier: Apache-2.0
"""What cannot be described from arguments alone says so; the rest is compared with real engines.

``tests/integration/engines/test_cli_explain.py`` does that.
"""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvxfer.errors import UnsupportedError
from kvxfer.vllm_specs import offline, offline_layers


def config(stages=1, method=None, context=1):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=stages, prefill_context_parallel_size=context
        ),
        speculative_config=None if method is None else SimpleNamespace(method=method),
    )


@pytest.mark.parametrize(
    ("refused", "way_out"),
    [
        (config(stages=2, context=2), "shows only once it runs"),
        (config(stages=2, method="eagle"), "depends on the stages"),
        (config(method="draft_model"), "describe it without speculative_config"),
        (config(method="mtp"), "method 'mtp' cannot be described without starting it"),
    ],
    ids=["stages_and_context", "stages_and_drafter", "draft_model", "mtp"],
)
def test_engine_whose_keys_only_it_knows_is_not_described(refused, way_out):
    with pytest.raises(offline_layers.NotDescribedError, match=way_out):
        offline_layers.refuse_what_takes_an_engine(refused)
    assert issubclass(offline_layers.NotDescribedError, UnsupportedError)


@pytest.mark.parametrize(
    "described",
    [
        config(stages=2),
        config(stages=2, method="ngram"),
        config(context=2),
        *(config(method=method) for method in ("eagle", "eagle3", "ngram_gpu", "suffix")),
    ],
)
def test_engine_whose_layers_arguments_tell_is_described(described):
    offline_layers.refuse_what_takes_an_engine(described)


@pytest.fixture
def groups(monkeypatch):
    """Return a function that makes process groups and returns each as (size, rank)."""
    for name in offline_layers._SIZES:
        monkeypatch.setattr(offline_layers.parallel_state, name, None, raising=False)

    def make(parallel, stage):
        offline_layers._stand_alone(parallel, stage)
        made = {n: getattr(offline_layers.parallel_state, n) for n in offline_layers._SIZES}
        return {name: (each.world_size, each.rank_in_group) for name, each in made.items()}

    return make


def parallel_config(stages, ranks):
    return SimpleNamespace(
        world_size=stages * ranks,
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        decode_context_parallel_size=2,
        rank=0,
    )


def test_process_groups_have_the_sizes_of_the_engine(groups):
    alone = {"_EP": (4, 0), "_DCP": (2, 0), "_PCP": (1, 0), "_PP": (1, 0), "_DP": (1, 0)}
    assert groups(parallel_config(1, 4), 0) == {"_WORLD": (4, 0), "_TP": (4, 0), **alone}
    assert offline_layers.parallel_state._TP.device_group.size() == 4


def test_process_groups_are_those_of_the_first_rank_of_a_stage(groups):
    parallel = parallel_config(3, 2)
    found = groups(parallel, 2)
    assert (found["_WORLD"], found["_PP"], found["_TP"]) == ((6, 4), (3, 2), (2, 0))
    assert parallel.rank == 4
    stage = offline_layers.parallel_state._PP
    assert (stage.is_first_rank, stage.is_last_rank) == (False, True)


def test_model_without_a_cache_is_refused_by_saying_so():
    with pytest.raises(UnsupportedError, match="nothing to store"):
        offline._settle_block_sizes(None, SimpleNamespace(kv_cache_groups=[]))
