# SPDX-License-Identifier: Apache-2.0
"""vLLM's configuration, cache specs and tensors in kvxfer's words; the one place that knows them.

    engine       check_version, read_engine -> EngineFacts: sizes, ranks, groups, refusals
    groups       a cache spec -> hits.CacheGroup, natively searched or by vLLM's own manager
    layer_sets   a cache group -> LayerSet: layers stored together, the heads a rank holds
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
from kvxfer.vllm_specs.tensors import regions

__all__ = [
    "EngineFacts",
    "LayerSet",
    "ValueNames",
    "check_version",
    "content_format",
    "name_values",
    "prefill_checkpoint",
    "read_config",
    "read_engine",
    "regions",
    "warn_of_settings",
]
