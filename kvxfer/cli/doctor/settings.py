# SPDX-License-Identifier: Apache-2.0
"""Checks of the configuration: what vLLM is told, our options, block hashes, the lookup channel."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from kvxfer.cli.deployment import CONNECTOR, MODULE, MULTI, POLICY, children
from kvxfer.cli.doctor.findings import Check, Finding, fault, note, ok, warning
from kvxfer.cli.doctor.surroundings import Surroundings
from kvxfer.config import KVXferConfig, Role
from kvxfer.errors import ConfigError
from kvxfer.lookup import Endpoint

SEED = "PYTHONHASHSEED"
SEEDED_HASHES = ("xxhash", "xxhash_cbor")
"""As ``vllm_specs.names`` has them: their seed is random per process unless it is set."""


def _json(around: Surroundings) -> Iterator[Finding]:
    if around.config_error is not None:
        yield fault(around.config_error, "correct it, then run doctor again for the other checks")
    elif around.deployment.transfer is None:
        yield note("no --config with a kv_transfer_config: defaults are checked")
    else:
        yield ok("the configuration is a JSON object")


def _connector(around: Surroundings) -> Iterator[Finding]:
    transfer = around.deployment.transfer
    if transfer is None:
        return
    right = f'"kv_connector": "{CONNECTOR}", "kv_connector_module_path": "{MODULE}"'
    if not around.deployment.connectors:
        named = [transfer.get("kv_connector"), *(c.get("kv_connector") for c in children(transfer))]
        near = [n for n in named if difflib.get_close_matches(str(n), [CONNECTOR, "KVXfer"], 1)]
        yield fault(
            f"no connector of kvxfer is configured: kv_connector is "
            f"{', '.join(map(repr, near or named))}",
            f"write {right}",
        )
    for each in around.deployment.connectors:
        name, module = each.get("kv_connector"), each.get("kv_connector_module_path")
        if name == CONNECTOR and module == MODULE:
            yield ok(f"{CONNECTOR} from {MODULE}")
        elif name == CONNECTOR and module and not str(module).startswith("kvxfer"):
            yield note(f"{CONNECTOR} from {module}, a module that is not kvxfer's")
        else:
            yield fault(
                f"kv_connector is {name!r} and kv_connector_module_path {module!r}: vLLM finds no "
                "such class",
                f"write {right}",
            )


def _role(around: Surroundings) -> Iterator[Finding]:
    roles = [role.value for role in Role]
    for each in around.deployment.connectors:
        role = each.get("kv_role")
        if role not in roles:
            yield fault(
                f"kv_role is {role!r}",
                f'set "kv_role" to {" or ".join(roles)}; kv_both saves, looks up and loads',
            )
        else:
            yield ok(f"kv_role is {role}")


def _policy(around: Surroundings) -> Iterator[Finding]:
    transfer = around.deployment.transfer
    if transfer is None:
        return
    policy = transfer.get(POLICY, "fail")
    if policy == "recompute":
        yield ok(f"{POLICY} is recompute")
        return
    where = " of the MultiConnector itself" if transfer.get("kv_connector") == MULTI else ""
    origin = "" if POLICY in transfer else ", the default of vLLM"
    yield fault(
        f"{POLICY}{where} is {policy!r}{origin}: a failed load ends its request with an error",
        f'set "{POLICY}": "recompute" beside kv_connector',
    )


def _options(around: Surroundings) -> Iterator[Finding]:
    for settings in around.deployment.settings():
        try:
            KVXferConfig.from_extra(settings, around.environ)
        except ConfigError as error:
            yield fault(str(error), "docs/options.md has every option of kv_connector_extra_config")
        else:
            yield ok(f"{len(settings)} option(s) of kv_connector_extra_config are valid")


def _use(around: Surroundings) -> Iterator[Finding]:
    roles = [each.get("kv_role") for each in around.deployment.connectors]
    for config, role in zip(around.configs(), roles, strict=False):
        if not config.enable_lookup and role == Role.CONSUMER:
            yield fault(
                "enable_lookup is false and kv_role kv_consumer: nothing is ever loaded or saved",
                "remove enable_lookup, or set kv_role to kv_producer or kv_both",
            )
        elif not config.enable_lookup:
            yield warning(
                "enable_lookup is false: this engine saves and never loads",
                "remove enable_lookup where it should load, too",
            )
        if not config.lookup_async:
            yield warning(
                f"lookup_async is false: each lookup holds up every request, up to "
                f"{config.lookup_timeout_s:g} s",
                "remove lookup_async",
            )
        if config.load_timeout_s < config.lookup_timeout_s:
            yield warning(
                f"load_timeout_s is {config.load_timeout_s:g}, less than lookup_timeout_s "
                f"({config.lookup_timeout_s:g}): what a lookup found is given up at once",
                "raise load_timeout_s; its default is 30",
            )


def _prefix_caching(around: Surroundings) -> Iterator[Finding]:
    if around.deployment.arguments.get("enable_prefix_caching") is False:
        yield fault(
            "enable_prefix_caching is false: vLLM hashes no blocks, so nothing is saved or found",
            "remove --no-enable-prefix-caching (enable_prefix_caching)",
        )


def _seed(around: Surroundings) -> Iterator[Finding]:
    algorithm = str(around.deployment.arguments.get("prefix_caching_hash_algo", "sha256"))
    seed = around.environ.get(SEED)
    if algorithm in SEEDED_HASHES and seed is None:
        yield fault(
            f"prefix_caching_hash_algo is {algorithm}, whose seed is random in every process: no "
            "engine finds what another one saved, nor its own after a restart",
            f"set {SEED} to the same number for every engine, or use sha256",
        )
    elif seed is not None:
        yield note(
            f"{SEED} is {seed!r}, hashes are {algorithm}: engines with another value share nothing"
        )
    else:
        yield ok(f"block hashes are {algorithm}, the same in every process")


def _channel(around: Surroundings) -> Iterator[Finding]:
    try:
        endpoint = Endpoint.for_engine("kvxfer doctor")
        endpoint.ensure_private_folder()
    except ConfigError as error:
        yield fault(str(error), "set XDG_RUNTIME_DIR or TMPDIR to a short path of your own")
    else:
        yield ok(f"lookup channels lie in {endpoint.path.parent}")


CHECKS = (
    Check("config.json", _json),
    Check("config.connector", _connector),
    Check("config.role", _role),
    Check("config.failure_policy", _policy),
    Check("config.options", _options),
    Check("config.use", _use),
    Check("config.prefix_caching", _prefix_caching),
    Check("config.hash_seed", _seed),
    Check("config.lookup_channel", _channel),
)
