# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from kvxfer.cli.deployment import default_transfer, read_deployment
from kvxfer.errors import ConfigError

OURS = {**default_transfer(), "kv_connector_extra_config": {"store_tp": 2}}
OTHER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def multi(*connectors):
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def test_config_may_be_a_transfer_configuration():
    deployment = read_deployment(json.dumps(OURS))
    assert deployment.transfer == OURS
    assert deployment.connectors == (OURS,)
    assert deployment.settings() == [{"store_tp": 2}]


def test_config_may_be_engine_arguments_with_dashes():
    text = json.dumps({"model": "m", "block-size": 32, "kv-transfer-config": OURS})
    deployment = read_deployment(text)
    assert deployment.model == "m"
    assert deployment.arguments["block_size"] == 32
    assert deployment.connectors == (OURS,)


def test_config_may_hold_the_transfer_configuration_as_a_shell_passes_it():
    text = json.dumps({"kv_transfer_config": json.dumps(OURS)})
    assert read_deployment(text).connectors == (OURS,)


def test_config_may_be_a_file(tmp_path):
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(OURS))
    assert read_deployment(str(path)).connectors == (OURS,)


def test_model_of_the_option_goes_before_that_of_the_arguments():
    assert read_deployment('{"model": "a"}', Path("b")).model == "b"


def test_children_of_a_multi_connector_are_ours_or_not():
    deployment = read_deployment(json.dumps(multi(OTHER, OURS, OURS)))
    assert deployment.connectors == (OURS, OURS)
    assert deployment.transfer["kv_connector"] == "MultiConnector"


@pytest.mark.parametrize("connectors", [None, 3, ["text"]])
def test_children_that_are_none_are_none(connectors):
    broken = multi()
    broken["kv_connector_extra_config"]["connectors"] = connectors
    assert read_deployment(json.dumps(broken)).connectors == ()


def test_without_a_configuration_defaults_stand():
    deployment = read_deployment(None)
    assert deployment.transfer is None
    assert deployment.settings() == [{}]
    assert deployment.engine_arguments()["kv_transfer_config"] == default_transfer()


def test_engine_arguments_are_of_our_connector_alone():
    arguments = read_deployment(json.dumps(multi(OTHER, OURS)), Path("m")).engine_arguments()
    assert arguments["kv_transfer_config"] == OURS
    assert arguments["model"] == "m"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no JSON"),
        ("no/such/file", "No such file"),
        ('{"kv_transfer_config": 3}', "write a JSON object"),
        ('{"kv_transfer_config": "3"}', "3"),
    ],
)
def test_what_is_no_configuration_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        read_deployment(text)


def test_a_file_with_a_list_is_refused(tmp_path):
    path = tmp_path / "list.json"
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="list, not a JSON object"):
        read_deployment(str(path))
