# SPDX-License-Identifier: Apache-2.0
"""The JSON file that ``MOONCAKE_CONFIG_PATH`` names, as vLLM's in-tree connector reads it."""

from __future__ import annotations

import difflib
import json
import re
from decimal import Decimal
from pathlib import Path

from kvxfer.errors import ConfigError
from kvxfer.stores.uri import SIZE_UNITS

FIELDS = {
    "master_server_address": "master",
    "metadata_server": "metadata",
    "protocol": "protocol",
    "device_name": "device",
    "mode": "mode",
    "global_segment_size": "segment",
    "local_buffer_size": "buffer",
    "enable_offload": "offload",
    "tenant_id": "tenant",
    # fields of the client's own file, which the in-tree connector leaves unread
    "local_hostname": "hostname",
    "enable_ssd_offload": "enable_ssd_offload",
    "ssd_offload_path": "ssd_offload_path",
    "enable_client_http_server": "enable_client_http_server",
    "client_http_port": "client_http_port",
}
"""The option that each field sets."""

SIZES = frozenset({"global_segment_size", "local_buffer_size"})
SWITCHES = {
    "enable_ssd_offload": "ssd_offload_path",
    "enable_client_http_server": "client_http_port",
}
"""A field that turns another one on; the other's default where it is on without it."""
SWITCH_DEFAULTS = {"ssd_offload_path": "", "client_http_port": "9300"}

_SIZE = re.compile(r"([\d.]+)\s*([a-z]*)", re.ASCII)
_BINARY_UNITS = {**SIZE_UNITS, "kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40}
"""In this file KB, MB and GB are powers of two, as the in-tree connector has them."""


def read_json(path: Path) -> dict[str, str]:
    """Return the file's fields as URI options; ``ConfigError`` for what no field can be.

    Without ``protocol`` it is rdma, as in the in-tree connector. A field that is null counts as
    absent.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Mooncake's configuration {path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"Mooncake's configuration {path} is no JSON object")
    for name in fields:
        if name not in FIELDS:
            nearest = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"{path}: unknown field {name!r}, did you mean {nearest!r}? "
                f"Valid: {', '.join(sorted(FIELDS))}"
            )
    options = {"protocol": "rdma"}
    for name, value in fields.items():
        if value is not None and value != "":
            options[FIELDS[name]] = _text(path, name, value)
    return _switched(options)


def _text(path: Path, name: str, value: object) -> str:
    if name in SIZES:
        return str(_size(path, name, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (str, int)):
        return str(value).strip()
    raise ConfigError(f"{path}: {name} is {value!r}; write a string, a number or true/false")


def _size(path: Path, name: str, value: object) -> int:
    match = _SIZE.fullmatch(str(value).strip().lower())
    unit = _BINARY_UNITS.get(match[2]) if match else None
    if match is None or unit is None or match[1].count(".") > 1 or match[1] == ".":
        raise ConfigError(f"{path}: {name} is {value!r}; write bytes or e.g. 4GB, 512MB (of 1,024)")
    return int(Decimal(match[1]) * unit)


def _switched(options: dict[str, str]) -> dict[str, str]:
    """Return the options with each pair of switch and setting as the setting alone."""
    for switch, setting in SWITCHES.items():
        is_on = options.pop(switch, "no").lower() in ("1", "true", "yes", "on")
        if is_on:
            options.setdefault(setting, SWITCH_DEFAULTS[setting])
        else:
            options.pop(setting, None)
    return options
