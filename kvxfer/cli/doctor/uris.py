# SPDX-License-Identifier: Apache-2.0
"""The check of store URIs, whatever store they name."""

from __future__ import annotations

from collections.abc import Iterator

from kvxfer.cli.doctor.findings import Check, Finding, fault, ok
from kvxfer.cli.doctor.surroundings import Surroundings
from kvxfer.config import default_store
from kvxfer.errors import KvxferError
from kvxfer.stores.lmdb_options import LmdbOptions
from kvxfer.stores.mooncake_options import MooncakeOptions
from kvxfer.stores.uri import parse_uri

WRITE = "write lmdb:///path?capacity=8GiB or mooncake://host:port; docs/options.md has all options"


def _uri(around: Surroundings) -> Iterator[Finding]:
    for settings in around.deployment.settings():
        text = settings.get("store", default_store(around.environ))
        if not isinstance(text, str):
            continue  # the check of the options says so
        try:
            uri = parse_uri(text)
            if uri.scheme == "lmdb":
                LmdbOptions.from_uri(uri)
            elif uri.scheme == "mooncake":
                MooncakeOptions.from_uri(uri, around.environ)
            else:
                yield fault(f"store {text!r} has scheme {uri.scheme!r}", WRITE)
                continue
        except KvxferError as error:
            yield fault(str(error), WRITE)
        else:
            yield ok(f"store {text}")


CHECKS = (Check("store.uri", _uri),)
