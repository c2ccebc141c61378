# SPDX-License-Identifier: Apache-2.0
"""Checks of Mooncake pools: the client, the master, memory in the pool, RDMA, one value."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Iterator

from kvxfer.cli.doctor.findings import Check, Finding, fault, ok, warning
from kvxfer.cli.doctor.lmdb import try_value
from kvxfer.cli.doctor.surroundings import Surroundings
from kvxfer.cli.mooncake_pool import quieten_client
from kvxfer.errors import ConfigError, StoreError
from kvxfer.stores.mooncake_check import check_reachable
from kvxfer.stores.mooncake_metrics import Occupancy, read_occupancy
from kvxfer.stores.mooncake_native import import_client, installed_builds
from kvxfer.stores.mooncake_options import MooncakeOptions, master_address


def _each(around: Surroundings) -> Iterator[MooncakeOptions]:
    """Yield the settings of each pool whose URI is in order."""
    for uri in around.stores():
        if uri.scheme == "mooncake":
            try:
                yield MooncakeOptions.from_uri(uri, around.environ)
            except (ConfigError, StoreError):
                continue  # the check of the URI says so


def _wants_client(around: Surroundings) -> bool:
    return any(uri.scheme == "mooncake" for uri in around.stores())


def _client(around: Surroundings) -> Iterator[Finding]:
    if not _wants_client(around):
        return
    quieten_client()
    builds = installed_builds()
    if len(builds) > 1:
        yield fault(
            f"{len(builds)} builds of the Mooncake client are installed over each other: "
            f"{', '.join(builds)}",
            "pip uninstall all of them, then install one",
        )
    try:
        import_client()
    except StoreError as error:
        text, _, way_out = str(error).rpartition(". ")
        yield fault(text, way_out)
    else:
        yield ok(f"Mooncake client: {', '.join(builds)}")


def _master(around: Surroundings) -> Iterator[Finding]:
    for options in _each(around):
        try:
            check_reachable(options)
        except StoreError as error:
            text, _, way_out = str(error).partition(": ")
            yield fault(text, way_out)
        else:
            yield ok(f"the master {options.master} takes connections")


def _segment(around: Surroundings) -> Iterator[Finding]:
    for options in _reachable(around):
        pool = _occupancy(options)
        if isinstance(pool, OSError):
            yield warning(
                f"the master's metrics cannot be read at port {options.metrics_port} ({pool}): "
                "how full the pool is stays unknown",
                "start the master with --metrics_port, and name it: ?metrics_port=9003",
            )
        elif pool.capacity_bytes == 0 and options.segment_bytes == 0:
            yield fault(
                f"no memory is mounted at {options.master}, and engines with this URI add none",
                "add segment=4GiB to the URI, or run python -m kvxfer.stores.mooncake_owner "
                "on the hosts that lend memory",
            )
        else:
            yield ok(
                f"the pool holds {pool.used_bytes:,} of {pool.capacity_bytes:,} bytes; each rank "
                f"adds {options.segment_bytes:,}"
            )


def _rdma(around: Surroundings) -> Iterator[Finding]:
    for options in _each(around):
        if options.protocol != "rdma":
            continue
        devices = around.rdma_devices
        if not devices.is_dir() or not any(devices.iterdir()):
            yield fault(
                "protocol is rdma, and this host shows no RDMA device",
                "set protocol=tcp, or give the container its devices (/dev/infiniband)",
            )
            continue
        yield ok(f"RDMA devices: {', '.join(sorted(each.name for each in devices.iterdir()))}")
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        needed = options.segment_bytes + options.buffer_bytes
        if limit != resource.RLIM_INFINITY and limit < needed:
            yield fault(
                f"this process may lock {limit:,} bytes of memory, RDMA wants {needed:,}",
                "ulimit -l unlimited (docker: --ulimit memlock=-1)",
            )


def _round_trip(around: Surroundings) -> Iterator[Finding]:
    from kvxfer.stores.mooncake import MooncakeStore  # noqa: PLC0415  # loads the client

    for options in _reachable(around):
        pool = _occupancy(options)
        if isinstance(pool, Occupancy) and pool.capacity_bytes == 0:
            continue  # no memory to put it into; the check of the segment says so
        try:
            store = MooncakeStore(dataclasses.replace(options, segment_bytes=0, check=False))
        except StoreError as error:
            yield fault(f"the client does not start: {error}", "see docs/troubleshooting.md")
            continue
        try:
            yield try_value(store, f"the pool of {options.master}")
        finally:
            store.close()


def _reachable(around: Surroundings) -> Iterator[MooncakeOptions]:
    """Yield the settings of each pool that can be talked to."""
    for options in _each(around):
        try:
            import_client()
            check_reachable(options)
        except StoreError:
            continue  # the checks of client and master say so
        yield options


def _occupancy(options: MooncakeOptions) -> Occupancy | OSError:
    address = master_address(options.master)
    if address is None:
        return OSError("the master goes by a high-availability name")
    try:
        return read_occupancy(address[0], options.metrics_port)
    except OSError as error:
        return error


CHECKS = (
    Check("mooncake.client", _client),
    Check("mooncake.master", _master),
    Check("mooncake.segment", _segment),
    Check("mooncake.rdma", _rdma),
    Check("mooncake.round_trip", _round_trip),
)
