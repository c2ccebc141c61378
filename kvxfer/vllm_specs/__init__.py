# SPDX-License-Identifier: Apache-2.0
"""vLLM's configuration, cache specs and tensors in kvxfer's words; the one place that knows them.

    engine       check_version, read_engine -> EngineFacts: sizes, ranks, groups, refusals
    groups       a cache spec -> hits.CacheGroup, natively searched or by vLLM's own manager
    ranks        RankPlace, StageRanks: which ranks share blocks, and how
    layer_sets   a cache group -> LayerSet: layers stored together, what of them a rank holds
    names        name_values -> ValueNames: model, digest and group names for keys; warnings
    tensors      registered tensors -> blocks.Region

Callers: scheduler, worker and connector, at start-up only.
"""

from kvxfer.vllm_specs.engine import (
    EngineFacts,
    check_version,
    prefill_checkpoint,
    read_config,
    read_engine,
)
from kvxfer.vllm_specs.layer_sets import LayerSet
from kvxfer.vllm_specs.names import ValueNames, content_format, name_values, warn_of_settings
from kvxfer.vllm_specs.ranks import RankPlace, place_of_this_rank
from kvxfer.vllm_specs.tensors import regions

__all__ = [
    "EngineFacts",
    "LayerSet",
    "RankPlace",
    "ValueNames",
    "check_version",
    "content_format",
    "name_values",
    "place_of_this_rank",
    "prefill_checkpoint",
    "read_config",
    "read_engine",
    "regions",
    "warn_of_settings",
]
