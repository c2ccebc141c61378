# SPDX-License-Identifier: Apache-2.0
"""Settings of the Mooncake store: URI options, the JSON file, variables, and what is refused."""

from __future__ import annotations

import json

import pytest

from kvxfer.errors import ConfigError, StoreError
from kvxfer.stores.mooncake_options import MooncakeOptions, master_address
from kvxfer.stores.parts import TransferMode
from kvxfer.stores.uri import parse_uri


def options(text, environ=None):
    return MooncakeOptions.from_uri(parse_uri(text), {"VLLM_HOST_IP": "here", **(environ or {})})


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a JSON file and returns its path."""

    def write(**fields):
        path = tmp_path / "mooncake.json"
        path.write_text(json.dumps(fields))
        return path

    return write


def test_options_of_a_bare_uri_are_the_documented_defaults():
    expected = MooncakeOptions("10.0.0.1:50051", hostname="here")
    assert options("mooncake://10.0.0.1:50051") == expected


def test_every_uri_option_reaches_its_field():
    text = (
        "mooncake://m:1?protocol=RDMA&device=mlx5_0&metadata=etcd://e:2379&segment=1GiB"
        "&buffer=16MiB&tenant=t&hostname=h&ssd_offload_path=/ssd&client_http_port=9301&offload=yes"
        "&replicas=2&preferred_segment=s:1&groups=1&soft_pin=true&timeout_s=5&batch_keys=9"
        "&batch_bytes=1MiB&in_flight=64&metrics_port=9004&check=no&mode=embedded"
        "&transfer=direct"
    )
    assert options(text) == MooncakeOptions(
        master="m:1",
        protocol="rdma",
        device="mlx5_0",
        metadata="etcd://e:2379",
        segment_bytes=1 << 30,
        buffer_bytes=16 << 20,
        tenant="t",
        hostname="h",
        ssd_offload_path="/ssd",
        client_http_port=9301,
        staging_bytes=1280 << 20,
        replicas=2,
        preferred_segment="s:1",
        groups=True,
        soft_pin=True,
        timeout_s=5.0,
        batch_keys=9,
        batch_bytes=1 << 20,
        in_flight=64,
        metrics_port=9004,
        transfer=TransferMode.DIRECT,
        check=False,
    )


def test_json_of_the_in_tree_connector_is_honoured_field_by_field(write):
    path = write(
        master_server_address="m:50051",
        metadata_server="http://m:8080/metadata",
        protocol="rdma",
        device_name="mlx5_0,mlx5_1",
        mode="embedded",
        global_segment_size="2GB",
        local_buffer_size="512mb",
        enable_offload=True,
        tenant_id=" team ",
    )
    expected = MooncakeOptions(
        master="m:50051",
        protocol="rdma",
        device="mlx5_0,mlx5_1",
        metadata="http://m:8080/metadata",
        segment_bytes=2 << 30,
        buffer_bytes=512 << 20,
        tenant="team",
        hostname="here",
        staging_bytes=1280 << 20,
    )
    assert options(f"mooncake://?config={path}") == expected
    assert options("mooncake://", {"MOONCAKE_CONFIG_PATH": str(path)}) == expected


def test_json_without_a_protocol_is_rdma_as_in_the_in_tree_connector(write):
    assert options(f"mooncake://?config={write(master_server_address='m:1')}").protocol == "rdma"


def test_json_of_a_standalone_store_needs_no_segment_size(write):
    path = write(master_server_address="m:1", mode="standalone-store")
    assert options(f"mooncake://?config={path}").segment_bytes == 0
    path = write(master_server_address="m:1", mode="standalone-store", global_segment_size=0)
    assert options(f"mooncake://?config={path}").segment_bytes == 0


def test_uri_options_go_before_the_file(write):
    path = write(master_server_address="m:1", protocol="rdma", global_segment_size="1GB")
    found = options(f"mooncake://n:2?config={path}&protocol=tcp&segment=2GiB")
    assert (found.master, found.protocol, found.segment_bytes) == ("n:2", "tcp", 2 << 30)


def test_a_uri_with_a_host_leaves_the_variable_of_the_file_unread():
    found = options("mooncake://m:1", {"MOONCAKE_CONFIG_PATH": "/nowhere.json"})
    assert found.master == "m:1"


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [(4096, 4096), ("4GB", 4 << 30), ("1.5 MB", 3 << 19), ("7b", 7), ("2KiB", 2048), ("9", 9)],
    ids=str,
)
def test_json_sizes_count_in_powers_of_two(write, size, num_bytes):
    path = write(master_server_address="m:1", global_segment_size=size)
    assert options(f"mooncake://?config={path}").segment_bytes == num_bytes


def test_json_switches_turn_their_settings_on(write):
    path = write(master_server_address="m:1", enable_ssd_offload=False, ssd_offload_path="/ssd")
    assert options(f"mooncake://?config={path}").ssd_offload_path is None
    path = write(master_server_address="m:1", enable_ssd_offload="true", ssd_offload_path="/ssd")
    assert options(f"mooncake://?config={path}").ssd_offload_path == "/ssd"
    path = write(master_server_address="m:1", enable_client_http_server=True)
    assert options(f"mooncake://?config={path}").client_http_port == 9300


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"global_segment_sise": 1}, "unknown field 'global_segment_sise', did you mean 'global_s"),
        ({"global_segment_size": "4 gallons"}, r"write bytes or e\.g\. 4GB"),
        ({"global_segment_size": "1.2.3GB"}, r"write bytes or e\.g\. 4GB"),
        ({"local_buffer_size": 0}, "buffer='0' is no size"),
        ({"mode": "embeded"}, "mode='embeded'; write embedded or standalone-store"),
        ({"mode": "embedded", "global_segment_size": 0}, "adds no memory"),
        ({"mode": "standalone-store", "global_segment_size": "1GB"}, "another process owns"),
        ({"metadata_server": "P2PHANDSHAK"}, "metadata.*is 'P2PHANDSHAK'; write P2PHANDSHAKE"),
        ({"device_name": ["mlx5_0"]}, r"device_name is \['mlx5_0'\]; write a string"),
        ({"enable_offload": "perhaps"}, "offload='perhaps'; write yes or no"),
        ({"master_server_address": None}, "names no master"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "_".join(value),
)
def test_json_that_cannot_be_is_refused_with_the_way_out(write, fields, message):
    path = write(**{"master_server_address": "m:1", **fields})
    with pytest.raises(ConfigError, match=message):
        options(f"mooncake://?config={path}")


@pytest.mark.parametrize("content", ["{", "[]", "\udc80"], ids=["cut", "list", "no_utf8"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, content):
    path = tmp_path / "m.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"cannot be read|is no JSON object"):
        options(f"mooncake://?config={path}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mooncake://", "names no master; write mooncake://host:port"),
        ("mooncake://m:1/path", "has a path"),
        ("mooncake://m:1?protocl=tcp", "unknown option 'protocl', did you mean 'protocol'"),
        ("mooncake://m:1?replicas=0", "replicas='0'; write a whole number"),
        ("mooncake://m:1?timeout_s=0.5", "whole seconds from 1"),
        ("mooncake://m:1?transfer=fast", "transfer='fast'; write packed, direct or auto"),
        ("mooncake://m:1?config=/nowhere.json", "cannot be read"),
    ],
    ids=["no_master", "path", "option", "replicas", "timeout", "transfer", "file"],
)
def test_a_uri_that_cannot_be_is_refused_with_the_way_out(text, message):
    with pytest.raises(ConfigError, match=message):
        options(text)


def test_the_own_hostname_comes_from_where_the_in_tree_connector_takes_it():
    environ = {"MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "rdma0", "VLLM_HOST_IP": "eth0"}
    assert options("mooncake://m:1", environ).hostname == "rdma0"
    assert options("mooncake://m:1?hostname=mine", environ).hostname == "mine"
    bare = MooncakeOptions.from_uri(parse_uri("mooncake://127.0.0.1:1"), {})
    assert bare.hostname == "127.0.0.1"


def test_the_preferred_segment_and_the_staging_come_from_their_variables():
    environ = {
        "MOONCAKE_PREFERRED_SEGMENT": "s:1",
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": "1000000",
        "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO": "0.5",
    }
    found = options("mooncake://m:1?offload=yes&batch_bytes=1GiB", environ)
    assert (found.preferred_segment, found.most_load_bytes) == ("s:1", 500_000)
    assert options("mooncake://m:1?batch_bytes=1GiB", environ).most_load_bytes == 1 << 30
    with pytest.raises(ConfigError, match="RATIO is 2"):
        options("mooncake://m:1", {"VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO": "2"})


@pytest.mark.parametrize(
    ("master", "expected"),
    [("h:1", ("h", 1)), ("[::1]:50051", ("::1", 50051)), ("etcd://a:1;b:2", None)],
)
def test_master_address_splits_what_is_one(master, expected):
    assert master_address(master) == expected


@pytest.mark.parametrize("master", ["host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_master_address_refuses_what_is_none(master):
    with pytest.raises(ConfigError, match="write host:port"):
        master_address(master)


def test_options_are_listed_in_the_migration_page():
    from pathlib import Path

    from kvxfer.stores.mooncake_json import FIELDS
    from kvxfer.stores.mooncake_options import URI_OPTIONS

    page = Path(__file__).parents[3] / "docs" / "from-mooncake-connector.md"
    text = page.read_text(encoding="utf-8")
    assert [name for name in (*FIELDS, *URI_OPTIONS) if f"`{name}`" not in text] == []


def test_a_master_without_a_route_is_told():
    with pytest.raises(StoreError, match=r"master nowhere\.invalid:1 cannot be reached"):
        MooncakeOptions.from_uri(parse_uri("mooncake://nowhere.invalid:1"), {})
