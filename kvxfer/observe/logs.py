# SPDX-License-Identifier: Apache-2.0
"""kvxfer's log lines where vLLM's are."""

from __future__ import annotations

import logging


def join_vllm_logging() -> None:
    """Send records of ``kvxfer`` to vLLM's handlers at vLLM's level; once, and only if it has any.

    vLLM configures its own logger alone, so that without this an engine would show our warnings
    unformatted and nothing below. A ``kvxfer`` logger that somebody configured is left as it is.
    """
    ours, theirs = logging.getLogger("kvxfer"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    ours.setLevel(theirs.level)
    ours.propagate = False
    for handler in theirs.handlers:
        ours.addHandler(handler)
