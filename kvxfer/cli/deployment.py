# SPDX-License-Identifier: Apache-2.0
"""What a user says of a deployment on the command line: ``--config`` and ``--model``, read once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvxfer.errors import ConfigError

CONNECTOR = "KVXferConnector"
MODULE = "kvxfer.connector"
MULTI = "MultiConnector"
TRANSFER = "kv_transfer_config"
EXTRA = "kv_connector_extra_config"
POLICY = "kv_load_failure_policy"


@dataclass(frozen=True, slots=True)
class Deployment:
    """One engine, as its operator configures it.

    ``arguments`` are vLLM's engine arguments by their Python names, ``kv_transfer_config`` among
    them where there is one. ``connectors`` are the transfer configurations of ours: that one, or
    those of a MultiConnector's children.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    connectors: tuple[dict[str, Any], ...] = ()

    @property
    def transfer(self) -> dict[str, Any] | None:
        """The transfer configuration that vLLM itself reads; None where there is none."""
        return self.arguments.get(TRANSFER)

    @property
    def model(self) -> str | None:
        """Folder or name of the model."""
        return self.arguments.get("model")

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of each connector of ours; one with defaults where there is none."""
        return [dict(each.get(EXTRA) or {}) for each in self.connectors] or [{}]

    def engine_arguments(self) -> dict[str, Any]:
        """Return what an engine of our first connector alone would be started with."""
        transfer = self.connectors[0] if self.connectors else default_transfer()
        return {"skip_tokenizer_init": True, **self.arguments, TRANSFER: transfer}


def default_transfer() -> dict[str, Any]:
    """Return the transfer configuration that the documents recommend, without settings."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        POLICY: "recompute",
    }


def read_deployment(config: str | None, model: Path | None = None) -> Deployment:
    """Read ``--config`` and ``--model``; ``ConfigError`` for what is no JSON object.

    ``config``: JSON or the path of a file with it. Either what ``--kv-transfer-config`` takes, or
    engine arguments with a ``kv_transfer_config`` among them, their names as in Python or with
    dashes. ``model`` goes before the model of the arguments.
    """
    given = {} if config is None else _read_json(config)
    arguments = {name.replace("-", "_"): value for name, value in given.items()}
    if "kv_connector" in arguments:
        arguments = {TRANSFER: given}
    transfer = arguments.get(TRANSFER)
    if isinstance(transfer, str):  # as a shell passes it
        transfer = arguments[TRANSFER] = _read_json(transfer)
    if transfer is not None and not isinstance(transfer, dict):
        raise ConfigError(f"{TRANSFER} is {transfer!r}; write a JSON object")
    if model is not None:
        arguments["model"] = str(model)
    return Deployment(arguments, tuple(_our_connectors(transfer or {})))


def is_ours(transfer: Mapping[str, Any]) -> bool:
    """Whether a transfer configuration means our connector, by either of its names."""
    module = str(transfer.get("kv_connector_module_path") or "")
    return transfer.get("kv_connector") == CONNECTOR or module.partition(".")[0] == "kvxfer"


def children(transfer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the transfer configurations of a MultiConnector's children; none of another's."""
    if transfer.get("kv_connector") != MULTI:
        return []
    found = (transfer.get(EXTRA) or {}).get("connectors")
    return [child for child in found if isinstance(child, dict)] if isinstance(found, list) else []


def _our_connectors(transfer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for each in (transfer, *children(transfer)):
        if is_ours(each):
            yield each


def _read_json(text: str) -> dict[str, Any]:
    """Return the JSON object that ``text`` is, or that the file of that name holds."""
    source = "--config"
    if not text.lstrip().startswith("{"):
        source = text
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--config {source}: {error}; give JSON or the path of a file with it"
            ) from error
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{source} is {type(value).__name__}, not a JSON object")
    return value
