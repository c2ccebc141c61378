# SPDX-License-Identifier: Apache-2.0
"""A reset over all ranks of an engine: every rank drains, and only then the keys are removed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvxfer.errors import ConfigError
from kvxfer.lookup.client import LookupClient
from kvxfer.lookup.endpoint import Endpoint

logger = logging.getLogger(__name__)


def reset_ranks(endpoints: Sequence[Endpoint], epoch: int, timeout_s: float) -> bool:
    """Drain the saves ordered before ``epoch`` on all ranks, then have the first remove the keys.

    Scheduler side; blocks up to ``timeout_s`` in all. The ranks drain at the same time. False,
    with a logged reason and nothing removed, where a rank is unreachable, fails or is not done
    in time; False, too, without ranks. A put that was in flight on any rank has ended before the
    keys are removed, so none lands after a reset that is True.
    """
    deadline_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        try:
            clients = [stack.enter_context(LookupClient(endpoint)) for endpoint in endpoints]
        except ConfigError as error:
            logger.warning("reset: a rank cannot be reached: %s", error)
            return False
        drained = _drain(clients, epoch, timeout_s)
        if not drained or not all(drained):
            ranks = zip(endpoints, drained, strict=True)
            failed = ", ".join(str(endpoint.path) for endpoint, done in ranks if not done)
            logger.warning("reset: not every rank has drained its saves: %s", failed or "no ranks")
            return False
        removed = clients[0].reset(deadline_s - time.monotonic(), epoch=epoch, remove=True)
        if not removed:
            logger.warning("reset: %s did not remove the keys", endpoints[0].path)
        return removed


def _drain(clients: Sequence[LookupClient], epoch: int, timeout_s: float) -> list[bool]:
    """Return for each rank whether it drained in time; each client is used by one thread."""
    if not clients:
        return []
    with ThreadPoolExecutor(len(clients), thread_name_prefix="kvxfer-reset") as pool:
        return list(
            pool.map(lambda client: client.reset(timeout_s, epoch=epoch, remove=False), clients)
        )
