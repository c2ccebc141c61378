# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from kvxfer.cli.engine_job import BLOCK_TOKENS, EngineJob, engine_environment


def job(num_tokens, output_tokens):
    prompts = [[3] * 5, [3] * num_tokens]
    settings = {"store": "lmdb:///somewhere"}
    return EngineJob(
        model="model", connector_settings=settings, prompts=prompts, output_tokens=output_tokens
    )


@pytest.mark.parametrize(
    ("num_tokens", "output_tokens", "expected"),
    [(48, 16, 64), (49, 16, 96), (1500, 16, 1536)],
    ids=["exact", "one_more", "default"],
)
def test_engine_is_as_long_as_the_longest_prompt_needs(num_tokens, output_tokens, expected):
    assert expected % BLOCK_TOKENS == 0
    arguments = job(num_tokens, output_tokens).engine_arguments
    assert arguments["max_model_len"] == expected
    assert arguments["max_num_batched_tokens"] == expected


def test_engine_loads_the_connector_by_path_and_recomputes_what_fails():
    config = job(48, 16).engine_arguments["kv_transfer_config"]
    assert config == {
        "kv_connector": "KVXferConnector",
        "kv_connector_module_path": "kvxfer.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": "lmdb:///somewhere"},
    }


def test_engine_never_uses_dummy_weights():
    assert "load_format" not in job(48, 16).engine_arguments


def test_environment_is_offline_whatever_the_caller_has():
    environment = engine_environment({"HF_HUB_OFFLINE": "0", "PATH": "/bin"})
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
        assert environment[name] == "1"
    assert environment["PATH"] == "/bin"


@pytest.mark.parametrize(("given", "expected"), [({}, "1"), ({"VLLM_CPU_KVCACHE_SPACE": "4"}, "4")])
def test_environment_leaves_the_cache_size_to_the_caller(given, expected):
    assert engine_environment(given)["VLLM_CPU_KVCACHE_SPACE"] == expected


def test_engine_computes_in_the_type_of_the_job():
    assert job(48, 16).engine_arguments["dtype"] == "float32"
    own = dataclasses.replace(job(48, 16), dtype="auto")
    assert own.engine_arguments["dtype"] == "auto"
