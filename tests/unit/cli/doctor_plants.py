# SPDX-License-Identifier: Apache-2.0
"""A healthy deployment for ``kvxfer doctor``, and what breaks it, one fault at a time."""

from __future__ import annotations

import copy
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from kvxfer.cli import deployment as deployments
from kvxfer.cli.deployment import default_transfer, read_deployment
from kvxfer.cli.doctor import Surroundings, lmdb, mooncake
from kvxfer.errors import ConfigError, StoreError
from kvxfer.stores import open_store

GROUP = {
    "group": 0,
    "kind": "full",
    "block_tokens": 16,
    "window_tokens": None,
    "cacheable": True,
    "layers": ["model.layers.0.self_attn.attn"],
    "shards": 1,
    "value_bytes": [65_536],
}
MODEL_ANSWER = {
    "model": "model",
    "digest": "d" * 32,
    "value_order": "token_major",
    "block_tokens": 16,
    "hash_tokens": 16,
    "align_tokens": 16,
    "num_ranks": 1,
    "groups": [GROUP],
}
INSTALL_ANSWER = {
    "torch": {"version": "2.13.0", "cuda": "13.0", "gpus": ["NVIDIA H200"]},
    "connector": {"class": "KVXferConnector"},
    "cupy": {"version": "14.0", "runtime": 13000, "driver": 13010},
    "kernels": {"origin": "binary"},
}
VERSIONS = {"vllm": "0.32.0", "torch": "2.13.0", "cupy-cuda13x": "14.0"}


@dataclass
class Site:
    """A machine and a configuration on which doctor finds nothing; plants change it."""

    folder: Path
    monkeypatch: object
    arguments: dict = field(default_factory=dict)
    transfer: dict = field(default_factory=default_transfer)
    text: str | None = None
    """Replaces the configuration's JSON."""
    environ: dict = field(default_factory=dict)
    versions: dict = field(default_factory=lambda: dict(VERSIONS))
    install: dict = field(default_factory=lambda: copy.deepcopy(INSTALL_ANSWER))
    model: dict = field(default_factory=lambda: copy.deepcopy(MODEL_ANSWER))
    python: tuple[int, int] = (3, 12)
    rdma: Path | None = None

    def __post_init__(self):
        self.store_folder = self.folder / "store"
        self.transfer["kv_connector_extra_config"] = {"store": self.uri()}
        checkpoint = self.folder / "model"
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text("{}")
        (checkpoint / "model.safetensors").write_bytes(b"")
        self.arguments["model"] = str(checkpoint)

    @property
    def settings(self):
        return self.transfer["kv_connector_extra_config"]

    def uri(self, options="?capacity=64MiB"):
        return f"lmdb://{self.store_folder}{options}"

    def make_store(self):
        open_store(self.uri()).close()

    def use_pool(self, uri="mooncake://127.0.0.1:50051?segment=0", **capacity):
        """Have the engine use a pool whose client, master and metrics answer."""
        self.settings["store"] = uri
        patch = self.monkeypatch.setattr
        patch(mooncake, "import_client", lambda: None)
        patch(mooncake, "installed_builds", lambda: ["mooncake 1"])
        patch(mooncake, "check_reachable", lambda options: None)
        pool = mooncake.Occupancy(0, 0, capacity.get("capacity_bytes", 0))
        patch(mooncake, "read_occupancy", lambda host, port: pool)

    def surroundings(self):
        """Return what doctor looks at."""
        arguments = {**self.arguments, deployments.TRANSFER: self.transfer}
        text = json.dumps(arguments) if self.text is None else self.text
        try:
            deployment, error = read_deployment(text), None
        except ConfigError as unreadable:
            deployment, error = read_deployment(None), str(unreadable)
        return Surroundings(
            deployment,
            config_error=error,
            environ=self.environ,
            python=self.python,
            nvidia_driver=self.folder / "no-driver",
            rdma_devices=self.rdma or self.folder / "no-rdma",
            ask=lambda question, environ: {"install": self.install, "model": self.model}[
                question["task"]
            ],
            version_of=self.versions.get,
        )


PLANTS = {}
"""Name of the fault -> (check that finds it, words of the finding, function that plants it)."""


def plant(check, words, name=None):
    """Register a function that plants a fault on a site, found by ``check``."""

    def register(function):
        PLANTS[name or function.__name__] = (check, words, function)
        return function

    return register


# Configuration


@plant("config.json", "is no JSON")
def config_is_cut_off(site):
    site.text = '{"kv_connector": "KVXferConnector"'


@plant("config.json", "No such file")
def config_file_is_missing(site):
    site.text = "no-such-file.json"


@plant("config.connector", "no connector of kvxfer")
def connector_is_misspelled(site):
    site.transfer.update(kv_connector="KVXferConector", kv_connector_module_path="vllm.x")


@plant("config.connector", "finds no such class")
def module_path_is_missing(site):
    del site.transfer["kv_connector_module_path"]


@plant("config.role", "kv_role is 'both'")
def role_is_unknown(site):
    site.transfer["kv_role"] = "both"


@plant("config.failure_policy", "ends its request")
def failure_policy_is_left_out(site):
    del site.transfer["kv_load_failure_policy"]


@plant("config.failure_policy", "of the MultiConnector itself")
def failure_policy_is_set_on_a_child_alone(site):
    child = site.transfer
    site.transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [child]},
    }


@plant("config.options", "did you mean 'store_tp'")
def option_is_misspelled(site):
    site.settings["store_pt"] = 2


@plant("config.options", "lookup_timeout_s is")
def option_has_another_type(site):
    site.settings["lookup_timeout_s"] = "soon"


@plant("config.options", "load_async=false is not supported")
def loads_are_synchronous(site):
    site.settings["load_async"] = False


@plant("config.use", "nothing is ever loaded or saved")
def engine_neither_saves_nor_loads(site):
    site.settings["enable_lookup"] = False
    site.transfer["kv_role"] = "kv_consumer"


@plant("config.prefix_caching", "vLLM hashes no blocks")
def prefix_caching_is_off(site):
    site.arguments["enable_prefix_caching"] = False


@plant("config.hash_seed", "random in every process")
def hashes_are_seeded_at_random(site):
    site.arguments["prefix_caching_hash_algo"] = "xxhash"


@plant("config.lookup_channel", "lookup folder")
def lookup_folder_is_open_to_others(site):
    folder = Path(os.environ["XDG_RUNTIME_DIR"]) / "kvxfer"
    folder.mkdir()
    folder.chmod(0o777)


# Stores


@plant("store.uri", "did you mean 'capacity'")
def uri_has_an_unknown_option(site):
    site.settings["store"] = site.uri("?capacty=1GiB")


@plant("store.uri", "takes three slashes")
def uri_names_a_host(site):
    site.settings["store"] = "lmdb://var/cache"


@plant("store.uri", "has scheme 'redis'")
def uri_has_another_scheme(site):
    site.settings["store"] = "redis://host"


@plant("lmdb.folder", "holds other files")
def folder_is_shared_with_other_files(site):
    site.store_folder.mkdir(mode=0o755)
    (site.store_folder / "notes.txt").write_text("mine")


@plant("lmdb.folder", "cannot be made")
def folder_lies_below_a_file(site):
    (site.folder / "file").write_text("")
    site.settings["store"] = f"lmdb://{site.folder}/file/store?capacity=64MiB"


@plant("lmdb.folder", "is on nfs")
def folder_is_on_a_network(site):
    site.monkeypatch.setattr(lmdb, "filesystem_of", lambda path: "nfs4")


@plant("lmdb.space", "does not fit")
def capacity_is_larger_than_the_disk(site):
    site.settings["store"] = site.uri("?capacity=4000TiB")


@plant("lmdb.contents", "has format 7")
def store_has_another_format(site):
    site.make_store()
    marker = site.store_folder / "kvxfer.json"
    marker.write_text(marker.read_text().replace('"format": 1', '"format": 7'))


@plant("lmdb.hosts", "ranks are on 2")
def embedded_store_for_two_hosts(site):
    site.arguments["nnodes"] = 2


@plant("lmdb.round_trip", "cannot be opened")
def store_is_open_on_another_host(site):
    site.make_store()
    site.monkeypatch.setattr(lmdb, "open_lmdb", _refuse)


@plant("lmdb.round_trip", "did not come back")
def store_changes_bytes(site):
    site.make_store()
    original = lmdb.open_lmdb

    def open_damaged(uri):
        store = original(uri)
        get = store.get_into

        def damage(keys, targets):
            outcomes = get(keys, targets)
            targets[0][0] ^= 1
            return outcomes

        site.monkeypatch.setattr(store, "get_into", damage)
        return store

    site.monkeypatch.setattr(lmdb, "open_lmdb", open_damaged)


def _refuse(*arguments):
    raise StoreError("no: for the test. Install something")


@plant("mooncake.client", "no: for the test")
def mooncake_client_is_missing(site):
    site.use_pool()
    site.monkeypatch.setattr(mooncake, "import_client", _refuse)


@plant("mooncake.client", "2 builds")
def two_mooncake_clients_are_installed(site):
    site.use_pool()
    builds = ["mooncake-transfer-engine 1", "mooncake-transfer-engine-non-cuda 1"]
    site.monkeypatch.setattr(mooncake, "installed_builds", lambda: builds)


@plant("mooncake.master", "no connection")
def master_is_not_there(site):
    from kvxfer.stores.mooncake_check import check_reachable

    site.use_pool("mooncake://127.0.0.1:1?segment=0")
    site.monkeypatch.setattr(mooncake, "check_reachable", check_reachable)


@plant("mooncake.segment", "no memory is mounted")
def pool_has_no_memory(site):
    site.use_pool()


@plant("mooncake.rdma", "no RDMA device")
def rdma_without_a_device(site):
    site.use_pool("mooncake://127.0.0.1:50051?protocol=rdma")


@plant("store.uri", "cannot be read")
def mooncake_file_is_missing(site):
    del site.settings["store"]
    site.environ["MOONCAKE_CONFIG_PATH"] = str(site.folder / "none.json")


# Installation


@plant("install.python", "Python 3.9")
def python_is_too_old(site):
    site.python = (3, 9)


@plant("install.native", "cannot be imported")
def native_module_is_missing(site):
    site.monkeypatch.setitem(sys.modules, "kvxfer._native.hits", None)


@plant("install.vllm", "vLLM 0.28.1")
def vllm_is_too_old(site):
    site.versions["vllm"] = "0.28.1"


@plant("install.vllm", "vLLM 0.34.0rc1")
def vllm_is_too_new(site):
    site.versions["vllm"] = "0.34.0rc1"


@plant("install.torch", "libtorch_cuda.so")
def torch_is_broken(site):
    site.install["torch"] = {"error": "libtorch_cuda.so: no such file", "kind": "OSError"}


@plant("install.connector", "No module named 'vllm'")
def connector_cannot_be_imported(site):
    site.install["connector"] = {
        "error": "No module named 'vllm'",
        "kind": "ModuleNotFoundError",
    }


@plant("install.torch", "ended with -11")
def process_that_imports_torch_crashes(site):
    site.install = {"error": "the process ended with -11", "kind": "ModelProcessError"}


@plant("gpu.device", "torch sees no GPU")
def gpu_is_hidden_from_torch(site):
    site.install["torch"]["gpus"] = []
    (site.folder / "no-driver").write_text("570")


@plant("gpu.cupy", "2 builds of CuPy")
def two_builds_of_cupy(site):
    site.versions["cupy-cuda12x"] = "13.0"


@plant("gpu.cupy", "cannot be imported")
def cupy_is_missing(site):
    site.install["cupy"] = {"error": "No module named 'cupy'", "kind": "UnsupportedError"}


@plant("gpu.cupy", "the driver knows 12.8")
def cupy_is_newer_than_the_driver(site):
    site.install["cupy"]["driver"] = 12080


@plant("gpu.kernels", "NVRTC")
def kernels_cannot_be_loaded(site):
    site.install["kernels"] = {"error": "NVRTC cannot compile", "kind": "UnsupportedError"}


# Model


@plant("model.folder", "no config.json")
def model_has_no_configuration(site):
    os.remove(Path(site.arguments["model"]) / "config.json")


@plant("model.folder", "no weights")
def model_has_no_weights(site):
    os.remove(Path(site.arguments["model"]) / "model.safetensors")


@plant("model.groups", "sleep mode")
def engine_is_refused(site):
    site.model = {"error": "sleep mode frees registered memory", "kind": "UnsupportedError"}


@plant("model.store_tp", "cannot be cut")
def store_tp_cuts_no_heads(site):
    site.model = {
        "error": "store_tp is 3: 8 KV heads cannot be cut; choose a multiple of 1 that divides 8",
        "kind": "ConfigError",
    }


@plant("model.value_order", "value_order 'native' is")
def value_order_has_to_be_set(site):
    site.model = {
        "error": "value_order 'native' is mixed; set value_order to token_major or head_major",
        "kind": "LayoutError",
    }


@plant("model.staging", "cannot hold a value")
def staging_is_smaller_than_a_value(site):
    site.settings["staging_bytes"] = "64KiB"


@plant("model.waste", "every save is refused")
def capacity_is_too_small_for_a_value(site):
    site.settings["store"] = site.uri("?capacity=1MiB")
    site.model["groups"][0]["value_bytes"] = [500_000]


# Warnings: it works, but less well than it could

WARNINGS = {}


def warn(check, words):
    """Register a function that plants something to improve."""

    def register(function):
        WARNINGS[function.__name__] = (check, words, function)
        return function

    return register


@warn("lmdb.folder", "mode 0755")
def folder_of_the_store_can_be_entered(site):
    site.make_store()
    site.store_folder.chmod(0o755)


@warn("lmdb.space", "cannot grow")
def store_cannot_grow(site):
    site.make_store()
    site.settings["store"] = site.uri("?capacity=4000TiB")


@warn("lmdb.contents", "was set aside")
def damaged_store_lies_aside(site):
    site.make_store()
    (site.store_folder / "data.mdb.damaged-20260101T000000-1").write_bytes(b"x")


@warn("lmdb.contents", "met damage")
def store_is_damaged(site):
    site.make_store()
    (site.store_folder / "damaged").write_text("")
    site.monkeypatch.setattr(lmdb, "open_lmdb", _refuse)


@warn("config.use", "never loads")
def lookups_are_off(site):
    site.settings["enable_lookup"] = False


@warn("config.use", "holds up every request")
def lookups_are_synchronous(site):
    site.settings["lookup_async"] = False


@warn("model.waste", "whole pages and books add")
def values_are_small(site):
    site.model["groups"][0]["value_bytes"] = [4_100]


@warn("model.waste", "puts fail before it does")
def pool_is_full_before_its_master_evicts(site):
    site.use_pool("mooncake://127.0.0.1:50051?segment=4GiB")
    site.model["groups"][0]["value_bytes"] = [131_088]


@warn("install.vllm", "as a library only")
def vllm_is_missing(site):
    del site.versions["vllm"]


@warn("mooncake.segment", "metrics cannot be read")
def metrics_do_not_answer(site):
    def fail(host, port):
        raise OSError("refused")

    site.use_pool()
    site.monkeypatch.setattr(mooncake, "read_occupancy", fail)
    store = SimpleNamespace(
        put_from=lambda keys, sources: [lmdb.Outcome.NO_SPACE],
        get_into=lambda keys, targets: [lmdb.Outcome.MISSING],
        remove=lambda keys: 0,
        close=lambda: None,
    )
    site.monkeypatch.setattr("kvxfer.stores.mooncake.MooncakeStore", lambda options: store)
