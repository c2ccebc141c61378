# SPDX-License-Identifier: Apache-2.0
import pytest

from kvxfer.config import KVXferConfig, Role
from kvxfer.errors import ConfigError
from kvxfer.stores.uri import parse_uri


def test_config_without_settings_has_the_embedded_store():
    assert KVXferConfig.from_extra({}, {}).store == "lmdb://"


def test_config_takes_mooncake_where_its_variable_is_set():
    config = KVXferConfig.from_extra({}, {"MOONCAKE_CONFIG_PATH": "/etc/m.json"})
    assert config.store == "mooncake://?config=/etc/m.json"


def test_config_names_a_mooncake_file_wherever_it_lies():
    config = KVXferConfig.from_extra({}, {"MOONCAKE_CONFIG_PATH": "/opt/c++ & more/m#1.json"})
    assert parse_uri(config.store).options == {"config": "/opt/c++ & more/m#1.json"}


def test_config_prefers_the_store_that_is_named():
    config = KVXferConfig.from_extra({"store": "lmdb:///x"}, {"MOONCAKE_CONFIG_PATH": "/m"})
    assert config.store == "lmdb:///x"


def test_config_names_the_nearest_setting_to_an_unknown_one():
    with pytest.raises(ConfigError, match=r"unknown setting 'lookup_asnyc'.*'lookup_async'"):
        KVXferConfig.from_extra({"lookup_asnyc": True}, {})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"store_tp": "2"}, "store_tp is '2'; it must be int"),
        ({"store_tp": True}, "store_tp is True; it must be int"),
        ({"lookup_async": 1}, "lookup_async is 1; it must be bool"),
        ({"value_order": "rows"}, "choose one of native, token_major, head_major"),
        ({"load_timeout_s": 0}, "load_timeout_s is 0.0; it must be positive"),
        ({"staging_bytes": "12 parsecs"}, "staging_bytes"),
        ({"load_async": False}, "load_async=false is not supported.*Remove"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_config_says_what_is_wrong_with_a_value(setting, message):
    with pytest.raises(ConfigError, match=message):
        KVXferConfig.from_extra(setting, {})


def test_config_converts_to_the_declared_types():
    config = KVXferConfig.from_extra(
        {"load_timeout_s": 3, "value_order": "token_major", "staging_bytes": "256MiB"}, {}
    )
    assert config.load_timeout_s == 3.0
    assert isinstance(config.load_timeout_s, float)
    assert config.value_order == "token_major"
    assert config.staging_bytes == 256 << 20


def test_only_a_consumer_does_not_save_prompts():
    assert [role.saves_prompts for role in Role] == [True, False, True]
