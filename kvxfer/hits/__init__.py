# SPDX-License-Identifier: Apache-2.0
"""How much of a prompt the store can give back: the aligned hit computation.

A hit is a boundary up to which every cache group has what it needs stored, and the answer is the
one that vLLM's own prefix cache would give over the same set of blocks. What a group needs depends
on its kind: full attention wants every block from token 0, a sliding window the blocks of one
window below the boundary, chunked local attention those of the current chunk, a recurrent model
the one state that ends there.

    lookup.server --> Coordinator.lookup --> search   reads answers, stops where one is unknown
                             |                  |
                             v                  v
                          answers  --exists-->  store (any number of shards behind it)

``groups`` describes cache groups and merges those of one spec. ``kinds`` says what the search wants
of a kind, ``native_kinds`` and ``manager_kind`` have one class a kind: its scan (``_native.hits``,
or the kind's own manager), which chunks the scan may read, its masks. ``search`` is the fixed-point
search over all groups. ``answers`` holds what the store said and decides how much to ask at a
time. ``explain`` says why a hit ends where it does. ``coordinator`` is the face; the scheduler uses
its rounding, the lookup server its lookup, saver and loader its masks.

Nothing here imports vLLM or torch: :mod:`kvxfer.vllm_specs` turns specs into ``CacheGroup``.
"""

from kvxfer.hits.coordinator import Coordinator, LookupAnswer
from kvxfer.hits.explain import Cut, Explanation, GroupReport
from kvxfer.hits.groups import CacheGroup, Manager

__all__ = [
    "CacheGroup",
    "Coordinator",
    "Cut",
    "Explanation",
    "GroupReport",
    "LookupAnswer",
    "Manager",
]
