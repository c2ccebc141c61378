# SPDX-License-Identifier: Apache-2.0
"""The installed Mooncake client: how it is imported, what its build can do, how it is bounded."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import re
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kvxfer.errors import StoreError
from kvxfer.stores.mooncake_names import group_of
from kvxfer.stores.mooncake_options import MooncakeOptions

logger = logging.getLogger(__name__)

INSTALL_CLIENT = "pip install mooncake-transfer-engine-non-cuda (or another build of it)"
INSTALL_LIBRARIES = "apt-get install -y libibverbs1 librdmacm1 libnuma1 libcurl4"
_LIBRARY = re.compile(r"(lib[\w.+-]+): cannot open shared object file")


def import_client() -> ModuleType:
    """Return ``mooncake.store``; ``StoreError`` with the original error and the line to install."""
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise StoreError(
            f"the Mooncake client cannot be imported: {error}. {_remedy(error)}"
        ) from error


def installed_builds() -> list[str]:
    """Return name and version of every installed build of the client; two of them clash."""
    names = importlib.metadata.packages_distributions().get("mooncake", [])
    return sorted({f"{name} {importlib.metadata.version(name)}" for name in names})


def bound_client(timeout_s: float, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have the client give up in time: set its own timeouts, where the user has set none.

    They are variables of the process that the client reads when it first starts: the first store
    that a process opens decides. Without them a request to a silent master takes 30 s, a transfer
    to a silent peer 32 s, and a set-up 90 s.
    """
    seconds = str(max(1, round(timeout_s)))
    for name, value in {
        "MC_RPC_TIMEOUT_MS": f"{round(timeout_s * 1000)}",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    }.items():
        environ.setdefault(name, value)


@dataclass(frozen=True, slots=True)
class Replication:
    """How values are stored: copies, place and life, as far as the build knows them."""

    module: Any
    options: MooncakeOptions
    can_group: bool
    can_prefer: bool
    can_pin: bool

    @classmethod
    def probe(cls, module: Any, options: MooncakeOptions) -> Replication:
        """Look what the build has, and log once what is asked for and what of it is missing."""
        config = module.ReplicateConfig()
        found = cls(
            module,
            options,
            can_group=hasattr(config, "group_ids"),
            can_prefer=hasattr(config, "preferred_segment"),
            can_pin=hasattr(config, "soft_pin_action") or hasattr(config, "with_soft_pin"),
        )
        logger.info(
            "Mooncake client: group ids %s, preferred segment %s, soft pin %s",
            *("yes" if can else "no" for can in (found.can_group, found.can_prefer, found.can_pin)),
        )
        for name, wanted, can in (
            ("groups", options.groups, found.can_group),
            ("preferred_segment", options.preferred_segment, found.can_prefer),
            ("soft_pin", options.soft_pin, found.can_pin),
        ):
            if wanted and not can:
                logger.warning("this build of the Mooncake client has no %s: it is ignored", name)
        return found

    def config(self, names: Sequence[str]) -> Any:
        """Return the client's description of a put of ``names``."""
        config = self.module.ReplicateConfig()
        config.replica_num = self.options.replicas
        if self.options.preferred_segment and self.can_prefer:
            config.preferred_segment = self.options.preferred_segment
        if self.options.groups and self.can_group:
            config.group_ids = [group_of(name) for name in names]
        if self.options.soft_pin and self.can_pin:
            if hasattr(config, "soft_pin_action"):
                config.soft_pin_action = self.module.SoftPinAction.ENABLE
            else:
                config.with_soft_pin = True
        return config


def _remedy(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("mooncake"):
        return f"Install it: {INSTALL_CLIENT}"
    if _LIBRARY.search(str(error)):
        return f"A system library is missing; on Debian and Ubuntu: {INSTALL_LIBRARIES}"
    return f"Builds found: {', '.join(installed_builds()) or 'none'}; {INSTALL_CLIENT}"
