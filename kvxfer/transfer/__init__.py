# SPDX-License-Identifier: Apache-2.0
"""Jobs on the worker side: how blocks and store meet, beside the engine's steps.

The scheduler side orders saves and loads (``specs``). On each rank a ``Saver`` and a ``Loader``
take them in, flatten a job into its values (``pieces``), cut these into batches that fit a
staging slot, and run the batches on their own ``threads``:

    save   store.exists -> pack into a slot -> [blocks_free] -> store.put_from -> [ended]
    load   store.get_into a slot -> unpack into blocks -> [ended]

The batches of one load are shared out to idle threads (``load_work``).

The ``JobBoard`` (``jobs``) is the one place that knows where a job stands: it lets a thread touch
vLLM's blocks only while the job lives, ends each job exactly once, by result or by deadline, and
hands the worker what to report after each step.
"""

from kvxfer.transfer.base import Route
from kvxfer.transfer.jobs import Job, JobBoard, JobResult, JobState, Reports
from kvxfer.transfer.loader import Loader
from kvxfer.transfer.saver import Saver
from kvxfer.transfer.specs import Chunks, LoadSpec, SaveSpec

__all__ = [
    "Chunks",
    "Job",
    "JobBoard",
    "JobResult",
    "JobState",
    "LoadSpec",
    "Loader",
    "Reports",
    "Route",
    "SaveSpec",
    "Saver",
]
