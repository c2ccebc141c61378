# SPDX-License-Identifier: Apache-2.0
"""Settings of the Mooncake store: its URI options, and where they come from."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvxfer.errors import ConfigError, StoreError
from kvxfer.stores.mooncake_json import read_json
from kvxfer.stores.parts import TransferMode
from kvxfer.stores.uri import StoreUri, check_options, parse_seconds, parse_size

CONFIG_VARIABLE = "MOONCAKE_CONFIG_PATH"
HOSTNAME_VARIABLES = ("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "VLLM_HOST_IP")
SEGMENT_VARIABLE = "MOONCAKE_PREFERRED_SEGMENT"
STAGING_RATIO_VARIABLE = "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO"
STAGING_VARIABLE = "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES"

PEER_TO_PEER = "P2PHANDSHAKE"
EMBEDDED, STANDALONE = "embedded", "standalone-store"
DEFAULT_STAGING_BYTES = 1280 << 20
"""What an owner of a disk tier stages loads in, where its environment says nothing."""

URI_OPTIONS = (
    *("batch_bytes", "batch_keys", "buffer", "check", "client_http_port", "config", "device"),
    *("groups", "hostname", "in_flight", "metadata", "metrics_port", "mode", "offload"),
    *("preferred_segment", "protocol", "replicas", "segment", "soft_pin", "ssd_offload_path"),
    *("tenant", "timeout_s", "transfer"),
)
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off", "")


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """How to open a Mooncake store; every field can be set in the URI, most in the JSON.

    ``segment_bytes`` is what this process adds to the pool, 0 in mode ``standalone-store``, where
    another process owns it; ``buffer_bytes`` is the client's own buffer, which these calls do not
    go through. ``timeout_s`` bounds a request to the master and a transfer without progress.
    ``batch_keys``, ``batch_bytes`` bound a native call, ``in_flight`` the segments of all threads.
    ``staging_bytes`` bounds what one call loads where there is a disk tier, else None.
    ``transfer``: how values are to be handed over.
    """

    master: str
    protocol: str = "tcp"
    device: str = ""
    metadata: str = PEER_TO_PEER
    segment_bytes: int = 4 << 30
    buffer_bytes: int = 128 << 20
    tenant: str = "default"
    hostname: str = "127.0.0.1"
    ssd_offload_path: str | None = None
    client_http_port: int | None = None
    staging_bytes: int | None = None
    staging_ratio: float = 0.9
    replicas: int = 1
    preferred_segment: str = ""
    groups: bool = False
    soft_pin: bool = False
    timeout_s: float = 10.0
    batch_keys: int = 256
    batch_bytes: int = 64 << 20
    in_flight: int = 1024
    metrics_port: int = 9003
    transfer: TransferMode = TransferMode.AUTO
    check: bool = True

    @classmethod
    def from_uri(cls, uri: StoreUri, environ: Mapping[str, str] = os.environ) -> MooncakeOptions:
        """Read ``mooncake://host:port?...`` or ``mooncake://?config=FILE&...``.

        Options of the URI go before fields of the file; the file defaults to
        ``$MOONCAKE_CONFIG_PATH``. ``ConfigError`` names what is wrong and the way out;
        ``StoreError`` where no route leads to the master and ``hostname`` is not given.
        """
        check_options(uri, URI_OPTIONS)
        if uri.path not in ("", "/"):
            raise ConfigError(f"store {uri.text!r} has a path; write mooncake://host:port?...")
        given = {**_file_options(uri, environ), **uri.options}
        if uri.host:
            given["master"] = uri.host
        if not given.get("master"):
            raise ConfigError(
                f"store {uri.text!r} names no master; write mooncake://host:port?protocol=tcp, or "
                f"set {CONFIG_VARIABLE} to a JSON file with master_server_address"
            )
        _check_metadata(given.get("metadata", PEER_TO_PEER))
        offload = _flag(given, "offload")
        return cls(
            master=given["master"],
            protocol=given.get("protocol", "tcp").lower(),
            device=given.get("device", ""),
            metadata=given.get("metadata", PEER_TO_PEER),
            segment_bytes=_segment_bytes(given),
            buffer_bytes=parse_size(given.get("buffer", "128MiB"), "buffer"),
            tenant=given.get("tenant", "").strip() or "default",
            hostname=_hostname(given, environ),
            ssd_offload_path=given.get("ssd_offload_path"),
            client_http_port=_optional_count(given, "client_http_port"),
            staging_bytes=_staging_bytes(environ) if offload else None,
            staging_ratio=_staging_ratio(environ),
            replicas=_count(given, "replicas", 1),
            preferred_segment=given.get("preferred_segment") or environ.get(SEGMENT_VARIABLE, ""),
            groups=_flag(given, "groups"),
            soft_pin=_flag(given, "soft_pin"),
            timeout_s=_timeout_s(given),
            batch_keys=_count(given, "batch_keys", 256),
            batch_bytes=parse_size(given.get("batch_bytes", "64MiB"), "batch_bytes"),
            in_flight=_count(given, "in_flight", 1024),
            metrics_port=_count(given, "metrics_port", 9003),
            transfer=_transfer_mode(given),
            check=_flag(given, "check", default="yes"),
        )

    @property
    def patience_s(self) -> float:
        """How long a call waits for others, each of which ends within ``timeout_s`` or is stuck."""
        return 3 * self.timeout_s

    @property
    def most_keys(self) -> int:
        """Keys of one native call: half of what may be in flight at most, so that two sides fit."""
        return min(self.batch_keys, self.most_segments)

    @property
    def most_segments(self) -> int:
        """Segments of one native call, and so the parts that a value may have."""
        return max(1, self.in_flight // 2)

    @property
    def most_load_bytes(self) -> int:
        """Bytes of one native load: less than the owner of a disk tier can stage."""
        if self.staging_bytes is None:
            return self.batch_bytes
        return min(self.batch_bytes, max(1, int(self.staging_bytes * self.staging_ratio)))


def master_address(master: str) -> tuple[str, int] | None:
    """Return host and port of a master; None for a high-availability name such as etcd://..."""
    if "://" in master:
        return None
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"Mooncake's master is {master!r}; write host:port, e.g. 10.0.0.1:50051")
    return host.strip("[]"), int(port)


def _file_options(uri: StoreUri, environ: Mapping[str, str]) -> dict[str, str]:
    path = uri.options.get("config") or ("" if uri.host else environ.get(CONFIG_VARIABLE, ""))
    return read_json(Path(path)) if path else {}


def _segment_bytes(given: Mapping[str, str]) -> int:
    """Return the bytes to add to the pool; the mode and the size must agree."""
    mode = given.get("mode", "")
    if mode not in ("", EMBEDDED, STANDALONE):
        raise ConfigError(f"mode={mode!r}; write {EMBEDDED} or {STANDALONE}")
    text = given.get("segment", "0" if mode == STANDALONE else "4GiB")
    size = 0 if text.strip() in ("0", "0B") else parse_size(text, "segment")
    if mode == EMBEDDED and size == 0:
        raise ConfigError(
            f"mode={EMBEDDED} with a segment of 0 bytes adds no memory; give segment "
            f"(global_segment_size), e.g. 4GiB, or mode={STANDALONE}"
        )
    if mode == STANDALONE and size:
        raise ConfigError(
            f"mode={STANDALONE} with a segment of {size} bytes: there another process owns the "
            f"pool; leave segment (global_segment_size) out, or set mode={EMBEDDED}"
        )
    return size


def _check_metadata(metadata: str) -> None:
    """Refuse what the client would take for the name of an etcd server, and wait for."""
    if metadata == PEER_TO_PEER or "://" in metadata or metadata.rpartition(":")[2].isdecimal():
        return
    raise ConfigError(
        f"metadata (metadata_server) is {metadata!r}; write {PEER_TO_PEER}, where no metadata "
        "server runs, else http://host:port/metadata, etcd://host:port or redis://host:port"
    )


def _hostname(given: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Return the name by which other hosts reach this one."""
    if given.get("hostname"):
        return given["hostname"]
    for variable in HOSTNAME_VARIABLES:
        if name := environ.get(variable, "").strip():
            return name
    address = master_address(given["master"])
    return _own_address(*address) if address else socket.gethostname()


def _own_address(host: str, port: int) -> str:
    """Return this host's address on the way to ``host``; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StoreError(f"Mooncake's master {host}:{port} cannot be reached: {error}") from error


def _staging_bytes(environ: Mapping[str, str]) -> int:
    text = environ.get(STAGING_VARIABLE)
    return parse_size(text, STAGING_VARIABLE) if text else DEFAULT_STAGING_BYTES


def _staging_ratio(environ: Mapping[str, str]) -> float:
    ratio = parse_seconds(environ.get(STAGING_RATIO_VARIABLE, "0.9"), STAGING_RATIO_VARIABLE)
    if not 0 < ratio <= 1:
        raise ConfigError(f"{STAGING_RATIO_VARIABLE} is {ratio}; it must be above 0, at most 1")
    return ratio


def _timeout_s(given: Mapping[str, str]) -> float:
    seconds = parse_seconds(given.get("timeout_s", "10"), "timeout_s")
    if seconds < 1:
        raise ConfigError(f"timeout_s={seconds}; Mooncake's own timeouts are whole seconds from 1")
    return seconds


def _transfer_mode(given: Mapping[str, str]) -> TransferMode:
    text = given.get("transfer", TransferMode.AUTO.value).strip().lower()
    modes = [mode.value for mode in TransferMode]
    if text not in modes:
        raise ConfigError(f"transfer={text!r}; write {', '.join(modes[:-1])} or {modes[-1]}")
    return TransferMode(text)


def _flag(given: Mapping[str, str], name: str, default: str = "no") -> bool:
    text = given.get(name, default).strip().lower()
    if text not in (*_YES, *_NO):
        raise ConfigError(f"{name}={text!r}; write yes or no")
    return text in _YES


def _count(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, str(default))
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError(f"{name}={text!r}; write a whole number from 1 to 65535")
    return int(text)


def _optional_count(given: Mapping[str, str], name: str) -> int | None:
    return _count(given, name, 0) if name in given else None
