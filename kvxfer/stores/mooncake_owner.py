# SPDX-License-Identifier: Apache-2.0
"""A process that adds memory to a Mooncake pool and moves no values: the capacity-only role.

    python -m kvxfer.stores.mooncake_owner 'mooncake://10.0.0.1:50051?segment=64GiB'

Engines use the pool with ``segment=0`` (mode ``standalone-store``), and what they store outlives
them. The URI, or the file that ``MOONCAKE_CONFIG_PATH`` names, is that of the engines but for the
segment. One line on stdout says that the segment is mounted. SIGTERM and SIGINT give it back, its
values with it. While the master is gone the client looks for it and then mounts the segment again.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from collections.abc import Sequence

from kvxfer.errors import ConfigError, StoreError
from kvxfer.stores.mooncake_check import check_reachable
from kvxfer.stores.mooncake_client import Client
from kvxfer.stores.mooncake_native import bound_client
from kvxfer.stores.mooncake_options import MooncakeOptions
from kvxfer.stores.uri import parse_uri

BUFFER_BYTES = 1 << 20
"""The client's own buffer, which only its own transfers would use."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Own a segment until a signal; return 0, or 1 after an error that is printed."""
    parser = argparse.ArgumentParser(
        prog="python -m kvxfer.stores.mooncake_owner", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "uri",
        nargs="?",
        default="mooncake://",
        help="mooncake://host:port?segment=64GiB&...; default: the file MOONCAKE_CONFIG_PATH names",
    )
    try:
        own(read_options(parser.parse_args(arguments).uri))
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def read_options(uri: str) -> MooncakeOptions:
    """Return the settings of an owner; ``ConfigError`` where they name no segment."""
    options = MooncakeOptions.from_uri(parse_uri(uri))
    if options.segment_bytes == 0:
        raise ConfigError(
            "an owner of no memory adds nothing: give segment (global_segment_size), e.g. "
            "segment=64GiB, and leave mode out"
        )
    return dataclasses.replace(options, buffer_bytes=BUFFER_BYTES)


def own(options: MooncakeOptions) -> None:
    """Mount a segment, wait for a signal and give the segment back; main thread only."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # for the client's threads too
    bound_client(options.timeout_s)
    check_reachable(options)
    client = Client.connect(options)
    print(f"{options.segment_bytes} bytes are mounted at {options.master}", flush=True)
    signal.sigwait(SIGNALS)
    client.close()


if __name__ == "__main__":
    sys.exit(main())
