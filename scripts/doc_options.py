# SPDX-License-Identifier: Apache-2.0
"""The page of all options: settings from the config class, store options described here."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterable, Iterator

from kvxfer.config import KVXferConfig
from kvxfer.stores.lmdb_options import VALID_OPTIONS
from kvxfer.stores.mooncake_options import URI_OPTIONS

INTRODUCTION = """\
# Options

Made by `make docs` from the code: change the code, not this page.

## kv_connector_extra_config

Keys of `kv_connector_extra_config` in `--kv-transfer-config`. An unknown one is refused at start-up
with the nearest valid name. A size may carry a unit (`"256MiB"`); `null` stands for the default
that the text names.

| setting | type | default | what it says |
|---|---|---|---|
"""

LMDB = {
    "capacity": "Bytes of the file, allocated when the store is made (`8GiB`, `500MB`). Values may "
    "take 85 % of it. Default: that of the existing store; for a new one 8 GiB, or a quarter of "
    "the free disk if that is less.",
    "lease_s": "Seconds for which a value that a lookup matched stays. Default 30.",
    "timeout_s": "Longest wait of a put or a removal for other writers. Default 10.",
}

MOONCAKE = {
    "batch_bytes": "Bytes of one native call. Default 64MiB.",
    "batch_keys": "Keys of one native call. Default 256.",
    "buffer": "The client's own buffer, which these calls do not go through. Default 128MiB.",
    "check": "`no` leaves out the value that is stored and read back at start-up. Default yes.",
    "client_http_port": "Port of the client's own HTTP server. Default: none.",
    "config": "Path of a JSON file in Mooncake's format; options of the URI go before it. "
    "Default: `MOONCAKE_CONFIG_PATH`, where the URI names no host.",
    "device": "RDMA devices, e.g. `mlx5_0`. Default: the client's choice.",
    "groups": "`yes`: the values of one chunk leave the pool together. Default no.",
    "hostname": "Name by which other hosts reach this one. Default: "
    "`MOONCAKE_REQUESTER_LOCAL_HOSTNAME`, `VLLM_HOST_IP`, else the address on the way to the "
    "master.",
    "in_flight": "Segments under way at once, all threads together. Default 1024.",
    "metadata": "Metadata server, or `P2PHANDSHAKE` for none. Default P2PHANDSHAKE.",
    "metrics_port": "HTTP port of the master: occupancy, and the list of keys. Default 9003.",
    "mode": "`embedded`: this process adds memory to the pool; `standalone-store`: others do.",
    "offload": "`yes` where owners have a disk tier: loads are cut to its staging. Default no.",
    "preferred_segment": "Where values are put first. Default: `MOONCAKE_PREFERRED_SEGMENT`.",
    "protocol": "`tcp` or `rdma`. Default tcp.",
    "replicas": "Copies of each value. Default 1.",
    "segment": "Memory that each rank adds to the pool; `0` for none. Default 4GiB.",
    "soft_pin": "`yes`: values of this engine leave last. Default no.",
    "ssd_offload_path": "Folder of the client's disk tier. Default: none.",
    "tenant": "Tenant of the pool. Default `default`.",
    "timeout_s": "Longest request to the master, and longest transfer without progress; whole "
    "seconds from 1. Default 10.",
    "transfer": "How values travel: `packed` by way of staging, `direct` in the parts in which "
    "they lie in the KV cache, `auto`: direct where a value is one run of it. Default auto.",
}

WITHOUT_TEXT = {
    "num_save_threads": "Threads of each worker that save.",
    "num_load_threads": "Threads of each worker that load.",
}
"""For settings whose field has no sentence of its own."""


def options_page() -> str:
    """Return the page; ``KeyError`` where options and descriptions do not match."""
    page = INTRODUCTION + "".join(_settings_rows())
    page += _store_section(
        "lmdb:///folder?...",
        "The folder may be left out: `$KVXFER_STORE_DIR`, else `~/.cache/kvxfer/lmdb`.",
        VALID_OPTIONS,
        LMDB,
    )
    page += _store_section(
        "mooncake://host:port?...",
        "The host is the master's. [from-mooncake-connector.md](from-mooncake-connector.md) has "
        "the fields of Mooncake's JSON file beside them.",
        URI_OPTIONS,
        MOONCAKE,
    )
    return page


def _settings_rows() -> Iterator[str]:
    texts, types = _field_texts(), typing.get_type_hints(KVXferConfig)
    for field in dataclasses.fields(KVXferConfig):
        text = texts.get(field.name) or WITHOUT_TEXT[field.name]
        for python, json in (("None", "`null`"), ("False", "`false`")):
            text = text.replace(python, json)
        yield _row(f"`{field.name}`", _type_name(types[field.name]), _default(field), text)


def _field_texts() -> dict[str, str]:
    """Return the sentences below the fields of the config class, by field."""
    (tree,) = ast.parse(inspect.getsource(KVXferConfig)).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(node.target, ast.Name)
            texts[node.target.id] = ast.literal_eval(after.value)
    return texts


def _type_name(kind: object) -> str:
    options = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{option}`" for option in options)
    names = [getattr(each, "__name__", str(each)) for each in options or (kind,)]
    return " or ".join("null" if name == "NoneType" else name for name in names)


def _default(field: dataclasses.Field[object]) -> str:
    """Return a default as JSON has it; sizes with their unit."""
    value = field.default
    if value is dataclasses.MISSING:
        return ""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and field.name.endswith("_bytes"):
        return f"{value >> 20}MiB"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _store_section(uri: str, text: str, names: Iterable[str], texts: dict[str, str]) -> str:
    """Return the table of one store's options."""
    if unknown := set(texts) - set(names):
        raise KeyError(f"{uri} has no option {sorted(unknown)}")
    head = f"\n## store: {uri}\n\n{text}\n\n| option | what it says |\n|---|---|\n"
    return head + "".join(_row(f"`{name}`", texts[name]) for name in sorted(names))


def _row(*cells: str) -> str:
    flat = (" ".join(cell.replace("``", "`").replace("|", "\\|").split()) for cell in cells)
    return f"| {' | '.join(flat)} |\n"
