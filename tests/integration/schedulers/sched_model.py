# SPDX-License-Identifier: Apache-2.0
"""A made-up model: the KV of a token and the token after it follow from the tokens up to it.

So every byte that a request may use is known, whoever computed, saved or loaded it.
"""

import hashlib
import struct
from dataclasses import dataclass, field

import numpy as np
import torch
from sched_configs import BLOCK, HEAD_SIZE, HEADS, LAYERS, WINDOW
from vllm.v1.outputs import ModelRunnerOutput

CONTENT_BYTES = 2 * HEAD_SIZE * 4
VOCABULARY = 60
POISON = 0x5A
PLACEHOLDER = -1


class Digests:
    """Eight bytes for each position of a list of tokens: of all tokens up to there."""

    def __init__(self):
        self._known = {}

    def of(self, tokens, salt=b""):
        """Return (n, 8) uint8."""
        state, rows = salt, []
        for token in tokens:
            state = self._next(state, token)
            rows.append(state)
        return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 8)

    def _next(self, state, token):
        found = self._known.get((state, token))
        if found is None:
            found = hashlib.blake2b(state + struct.pack("<i", token), digest_size=8).digest()
            self._known[state, token] = found
        return found


DIGESTS = Digests()


def next_token(digest):
    """Return the token that the model samples after a prefix of this digest."""
    return int(digest[0]) % VOCABULARY + 2


def continuation(tokens, num_tokens, salt=b""):
    """Return the tokens that the model generates after ``tokens``."""
    tokens, start = list(tokens), len(tokens)
    for _ in range(num_tokens):
        tokens.append(next_token(DIGESTS.of(tokens, salt)[-1]))
    return tokens[start:]


def kv_bytes(digests, layer, heads, weights=0):
    """Return (n, heads, content) int8: what the model writes for n positions.

    ``weights``: how often the weights have been replaced, at most four times.
    """
    repeated = np.tile(digests, (1, CONTENT_BYTES // 8))
    masks = np.array([layer * 31 + head * 7 + 1 + weights * 49 for head in heads], np.uint8)
    return (repeated[:, None, :] ^ masks[None, :, None]).view(np.int8)


def make_caches(num_blocks, num_heads, windowed):
    """Return the cache tensors of one rank, poisoned; groups lie over the same bytes."""
    shape = (num_blocks, num_heads, BLOCK, CONTENT_BYTES)
    tensors = [torch.full(shape, POISON, dtype=torch.int8) for _ in LAYERS]
    if windowed:
        tensors = [tensors[0]] * len(LAYERS)
    return dict(zip(LAYERS, tensors, strict=True))


@dataclass
class Running:
    """A request as a model runner knows it."""

    tokens: list
    tables: list
    computed: int
    salt: bytes = b""
    drafts: list = field(default_factory=list)
    samples: bool = True
    """False for a pooling request."""


@dataclass
class Work:
    """What one step computes for one request: positions from ``start`` on."""

    digests: np.ndarray
    start: int
    tables: list


class ModelRunner:
    """Follows scheduler outputs as runner v1 and v2 do; proposes drafts, some of them wrong."""

    def __init__(self, num_spec_tokens, windowed, corrects_itself):
        """``corrects_itself``: under async scheduling the runner knows what was accepted."""
        self._num_spec_tokens, self._windowed = num_spec_tokens, windowed
        self._corrects_itself = corrects_itself
        self.weights = 0
        self.requests = {}
        self.salts = {}
        """Request id -> what else the KV of its tokens depends on: LoRA, images, a salt."""
        self.last_drafts = ([], [])

    def begin(self, output):
        """Take a step in; return its work by request, and the tokens that it samples."""
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            salt = self.salts.get(new.req_id, b"")
            tables = [list(table) for table in new.block_ids]
            self.requests[new.req_id] = Running(
                tokens, tables, new.num_computed_tokens, salt, samples=new.pooling_params is None
            )
        self._take_cached(output.scheduled_cached_reqs)
        work, sampled = {}, {}
        for request_id, count in output.num_scheduled_tokens.items():
            spec = output.scheduled_spec_decode_tokens.get(request_id, [])
            work[request_id], sampled[request_id] = self._advance(request_id, count, spec)
        with_drafts = [name for name in sampled if sampled[name] and self._num_spec_tokens]
        self.last_drafts = (with_drafts, [list(self.requests[n].drafts) for n in with_drafts])
        return work, sampled

    def _take_cached(self, cached):
        for idx, request_id in enumerate(cached.req_ids):
            request, blocks = self.requests[request_id], cached.new_block_ids[idx]
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                request.tables = [list(table) for table in blocks]
                request.computed = cached.num_computed_tokens[idx]
                request.tokens = list(cached.all_token_ids.get(request_id, request.tokens))
                request.drafts = []
            elif blocks is not None:
                for table, more in zip(request.tables, blocks, strict=True):
                    table += more
            if not self._corrects_itself:
                assert request.computed == cached.num_computed_tokens[idx], request_id

    def _advance(self, request_id, count, spec):
        request = self.requests[request_id]
        drafts = (request.drafts + [PLACEHOLDER] * len(spec))[: len(spec)]
        known = count - len(spec)
        inputs = request.tokens[: request.computed + known] + drafts
        assert len(inputs) == request.computed + count, "the step computes tokens nobody has"
        digests = DIGESTS.of(inputs, request.salt)
        work = Work(digests, request.computed, [list(table) for table in request.tables])
        if request.computed + known < len(request.tokens) or not request.samples:
            request.computed += count
            return work, []
        sampled = [next_token(digests[request.computed + known - 1])]
        for idx, draft in enumerate(drafts):
            if draft != sampled[-1]:
                break
            sampled.append(next_token(digests[request.computed + known + idx]))
        request.computed += known + len(sampled) - 1
        request.tokens += sampled
        request.drafts = self._propose(request)
        return work, sampled

    def _propose(self, request):
        drafts = continuation(request.tokens, self._num_spec_tokens, request.salt)
        num_right = sum(request.tokens) % (self._num_spec_tokens + 1)
        return drafts[:num_right] + [1] * (self._num_spec_tokens - num_right)

    def check(self, caches, heads, work):
        """Assert that every token that counts as computed has its bytes in the cache."""
        for request_id, item in work.items():
            for layer, name in enumerate(LAYERS):
                first = max(0, item.start - WINDOW + 1) if self._windowed and layer else 0
                where = np.arange(first, item.start)
                found = self._at(caches[name], item.tables[self._group(layer)], where)
                wanted = kv_bytes(item.digests[first : item.start], layer, heads, self.weights)
                wrong = np.flatnonzero((found != wanted).any(axis=(1, 2))) + first
                assert len(wrong) == 0, (
                    f"{request_id}: layer {layer} lacks the KV of tokens {wrong} below {item.start}"
                )

    def forward(self, caches, heads, work):
        """Write the KV of the step's tokens."""
        for item in work.values():
            where = np.arange(item.start, len(item.digests))
            for layer, name in enumerate(LAYERS):
                blocks = np.array(item.tables[self._group(layer)])[where // BLOCK]
                assert blocks.all(), "a computed token lies in the null block"
                values = kv_bytes(item.digests[item.start :], layer, heads, self.weights)
                caches[name].numpy()[blocks, :, where % BLOCK] = values

    def _group(self, layer):
        return layer if self._windowed else 0

    @staticmethod
    def _at(cache, table, where):
        blocks = np.array(table, dtype=np.int64)[where // BLOCK]
        return cache.numpy()[blocks, :, where % BLOCK]


def runner_output(sampled, kv_output):
    """Return what a runner hands to the scheduler."""
    names = list(sampled)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: idx for idx, name in enumerate(names)},
        sampled_token_ids=[list(sampled[name]) for name in names],
        kv_connector_output=kv_output,
    )


def heads_of(rank, num_ranks):
    """Return the global heads that a rank holds."""
    size = HEADS // num_ranks
    return range(rank * size, (rank + 1) * size)
