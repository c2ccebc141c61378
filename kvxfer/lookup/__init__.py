# SPDX-License-Identifier: Apache-2.0
"""The channel over which the scheduler asks how much of a prompt's prefix is stored.

The scheduler process knows the hashes of a prompt; the store and the aligned hit computation
live in the worker of rank 0. One ZMQ connection joins the two, over an ``ipc://`` path that only
this user can reach:

    scheduler process                                  worker process of rank 0
    LookupClient.lookup(key, tokens, hashes)
      packs hashes, sends, returns None  -- LOOKUP -->  LookupServer, thread "kvxfer-lookup"
    ... the engine keeps stepping ...                     on_lookup(tokens, PackedHashes)
    LookupClient.lookup(key, ...)        <-- reply ---    (hit length, tail boundaries)
      returns a LookupReply, forgets it

- ``endpoint``: where the path lies, who may reach it, and how the server claims it.
- ``protocol``: the frames, as pure functions over bytes. No pickle; every count has a bound.
- ``hashes``: ``PackedHashes``, a sequence of hashes that are never split apart.
- ``client``: ``LookupClient``, the scheduler side. It never waits unless told to.
- ``server``: ``LookupServer``, the worker side. It answers everything, errors included. Ranks
  other than 0 have one too, because a reset has to reach all of them.
- ``reset``: ``reset_ranks``, which drains every rank before anything is removed.

Whatever goes wrong is a miss: an exception, a deadline, a dead or restarted server, a malformed
frame. A miss costs compute; a wait would stall every request of the step. An answer belongs to
the question whose id it repeats, and to no other.
"""

from kvxfer.lookup.client import LookupClient, LookupCounters, LookupReply
from kvxfer.lookup.endpoint import Endpoint
from kvxfer.lookup.hashes import PackedHashes
from kvxfer.lookup.protocol import Status
from kvxfer.lookup.reset import reset_ranks
from kvxfer.lookup.server import LookupServer, ServerCounters

__all__ = [
    "Endpoint",
    "LookupClient",
    "LookupCounters",
    "LookupReply",
    "LookupServer",
    "PackedHashes",
    "ServerCounters",
    "Status",
    "reset_ranks",
]
