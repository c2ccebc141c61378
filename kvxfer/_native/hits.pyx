# SPDX-License-Identifier: Apache-2.0
"""The longest hit of one kind of cache group, over what is known of the store so far."""

from libc.stdint cimport int32_t, int64_t, uint8_t

UNKNOWN = 0
ABSENT = 1
PRESENT = 2

cdef enum:
    _UNKNOWN = 0
    _ABSENT = 1
    _PRESENT = 2


cdef struct Hit:
    int64_t tokens
    int64_t first_block
    int64_t num_blocks
    int64_t unknown_idx


def find_full(
    const uint8_t[::1] states,
    int64_t max_tokens,
    int64_t block_tokens,
    int64_t hash_tokens,
    int64_t align_tokens,
    bint drop_eagle,
):
    """Return the hit of full attention: the blocks from token 0 to the first hole.

    ``states`` (num_hashes,) uint8 of UNKNOWN, ABSENT, PRESENT, by hash index. The tuple is
    (tokens, first loaded block, blocks, hash index of the first unknown answer that the scan
    met, or -1); with an unknown the rest means nothing. ``drop_eagle`` gives one block back, or
    one hash unit where hits fall below the block.
    """
    cdef Hit hit
    _check(max_tokens, block_tokens, hash_tokens, align_tokens)
    with nogil:
        hit = _find_full(states, max_tokens, block_tokens, hash_tokens, align_tokens, drop_eagle)
    return hit.tokens, hit.first_block, hit.num_blocks, hit.unknown_idx


def find_sliding_window(
    const uint8_t[::1] states,
    int64_t max_tokens,
    int64_t block_tokens,
    int64_t hash_tokens,
    int64_t align_tokens,
    bint drop_eagle,
    int64_t window_tokens,
):
    """Return the hit of a sliding window: the last boundary whose whole window is stored.

    Arguments and tuple as for ``find_full``. Where no window is whole, the blocks stored from
    token 0 on are the hit. ``drop_eagle`` wants one block more and gives it back.
    """
    cdef Hit hit
    _check(max_tokens, block_tokens, hash_tokens, align_tokens)
    if window_tokens < 1:
        raise ValueError(f"window_tokens is {window_tokens}, wants at least 1")
    with nogil:
        hit = _find_sliding_window(
            states, max_tokens, block_tokens, hash_tokens, align_tokens, drop_eagle, window_tokens
        )
    return hit.tokens, hit.first_block, hit.num_blocks, hit.unknown_idx


def find_chunked_local(
    const uint8_t[::1] states,
    int64_t max_tokens,
    int64_t block_tokens,
    int64_t hash_tokens,
    int64_t chunk_tokens,
):
    """Return the hit of chunked local attention below ``max_tokens``.

    Tuple as for ``find_full``. Blocks before the chunk in which ``max_tokens`` lies are never
    attended again: they count as there and are not loaded.
    """
    cdef Hit hit
    _check(max_tokens, block_tokens, hash_tokens, block_tokens)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}, wants at least 1")
    with nogil:
        hit = _find_chunked_local(states, max_tokens, block_tokens, hash_tokens, chunk_tokens)
    return hit.tokens, hit.first_block, hit.num_blocks, hit.unknown_idx


def find_mamba(
    const uint8_t[::1] states,
    int64_t max_tokens,
    int64_t block_tokens,
    int64_t hash_tokens,
    int64_t align_tokens,
):
    """Return the hit of recurrent states: the last boundary whose state is stored.

    Arguments and tuple as for ``find_full``; there is no EAGLE block to give back, because
    drafters have no recurrent layers.
    """
    cdef Hit hit
    _check(max_tokens, block_tokens, hash_tokens, align_tokens)
    with nogil:
        hit = _find_mamba(states, max_tokens, block_tokens, hash_tokens, align_tokens)
    return hit.tokens, hit.first_block, hit.num_blocks, hit.unknown_idx


def count_unknown(const uint8_t[::1] states, const int32_t[::1] hash_idx):
    """Return how many of the answers ``states[hash_idx]`` are UNKNOWN.

    Raises IndexError for the first of ``hash_idx`` (n,) that lies outside ``states``.
    """
    cdef Py_ssize_t count
    _check_inside(hash_idx, states.shape[0])
    with nogil:
        count = _count_unknown(states, hash_idx)
    return count


def note_answers(
    uint8_t[::1] states, const int32_t[::1] hash_idx, const uint8_t[::1] answers
):
    """Set ``states[hash_idx[i]]`` to PRESENT where ``answers[i]`` is 1, to ABSENT elsewhere.

    Raises IndexError for the first of ``hash_idx`` (n,) that lies outside ``states``, ValueError
    for another number of ``answers``; nothing is written then.
    """
    if answers.shape[0] != hash_idx.shape[0]:
        raise ValueError(f"{answers.shape[0]} answers for {hash_idx.shape[0]} chunks")
    _check_inside(hash_idx, states.shape[0])
    with nogil:
        _note_answers(states, hash_idx, answers)


def join_shards(const uint8_t[::1] flags, uint8_t[::1] whole):
    """Set ``whole[i]`` to 1 where every flag of chunk i is 1, else to 0; return how many are.

    ``whole`` (n,); ``flags`` (n * shards,), those of a chunk together. Raises ValueError where
    they do not divide.
    """
    cdef Py_ssize_t num_chunks = whole.shape[0], num_shards = 0, count
    if num_chunks:
        num_shards = flags.shape[0] // num_chunks
    if flags.shape[0] != num_chunks * num_shards:
        raise ValueError(f"{flags.shape[0]} flags are no whole number for {num_chunks} chunks")
    with nogil:
        count = _join_shards(flags, num_shards, whole)
    return count


cdef int _check_inside(const int32_t[::1] hash_idx, Py_ssize_t bound) except -1:
    """Raise IndexError unless every index lies in [0, bound)."""
    cdef Py_ssize_t i
    for i in range(hash_idx.shape[0]):
        if hash_idx[i] < 0 or hash_idx[i] >= bound:
            raise IndexError(f"hash_idx[{i}] is {hash_idx[i]}, there are {bound} answers")
    return 0


cdef Py_ssize_t _count_unknown(
    const uint8_t[::1] states, const int32_t[::1] hash_idx
) noexcept nogil:
    cdef Py_ssize_t i, count = 0
    for i in range(hash_idx.shape[0]):
        count += states[hash_idx[i]] == _UNKNOWN
    return count


cdef void _note_answers(
    uint8_t[::1] states, const int32_t[::1] hash_idx, const uint8_t[::1] answers
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(hash_idx.shape[0]):
        states[hash_idx[i]] = _PRESENT if answers[i] == 1 else _ABSENT


cdef Py_ssize_t _join_shards(
    const uint8_t[::1] flags, Py_ssize_t num_shards, uint8_t[::1] whole
) noexcept nogil:
    cdef Py_ssize_t i, shard, count = 0
    cdef uint8_t every
    for i in range(whole.shape[0]):
        every = 1
        for shard in range(num_shards):
            every &= flags[i * num_shards + shard] == 1
        whole[i] = every
        count += every
    return count


cdef int _check(
    int64_t max_tokens, int64_t block_tokens, int64_t hash_tokens, int64_t align_tokens
) except -1:
    """Raise ValueError unless lengths are sane and the sizes divide one another."""
    if max_tokens < 0:
        raise ValueError(f"max_tokens is {max_tokens}, wants at least 0")
    if hash_tokens < 1 or block_tokens < 1 or block_tokens % hash_tokens:
        raise ValueError(
            f"block_tokens is {block_tokens}, wants a multiple of hash_tokens {hash_tokens}"
        )
    if align_tokens < 1 or (align_tokens % block_tokens and align_tokens != hash_tokens):
        raise ValueError(
            f"align_tokens is {align_tokens}, wants a multiple of block_tokens {block_tokens} "
            f"or hash_tokens {hash_tokens}"
        )
    return 0


cdef Hit _unknown(int64_t hash_idx) noexcept nogil:
    cdef Hit hit
    hit.tokens = 0
    hit.first_block = 0
    hit.num_blocks = 0
    hit.unknown_idx = hash_idx
    return hit


cdef Hit _known(int64_t tokens, int64_t first_block, int64_t num_blocks) noexcept nogil:
    cdef Hit hit
    hit.tokens = tokens
    hit.first_block = first_block
    hit.num_blocks = num_blocks
    hit.unknown_idx = -1
    return hit


cdef Hit _find_full(
    const uint8_t[::1] states,
    int64_t max_tokens,
    int64_t block_tokens,
    int64_t hash_tokens,
    int64_t align_tokens,
    bint drop_eagle,
) noexcept nogil:
    cdef int64_t scale = block_tokens // hash_tokens
    cdef int64_t limit = min(max_tokens // block_tokens, states.shape[0] // scale)
    cdef int64_t blocks = 0
    cdef int64_t tokens, unit
    cdef uint8_t state = _PRESENT
    while blocks < limit:
        state = states[(blocks + 1) * scale - 1]
        if state != _PRESENT:
            break
        blocks += 1
    if state == _UNKNOWN:
        return _unknown((blocks + 1) * scale - 1)
    tokens = blocks * block_tokens
    if align_tokens < block_tokens:
        unit = _last_unit_of_block(states, max_tokens, hash_tokens, blocks * scale, scale)
        if unit < -1:
            return _unknown(-unit - 2)
        if unit >= 0:
            tokens = (unit + 1) * hash_tokens
    if drop_eagle and tokens > 0:
        tokens -= min(align_tokens, block_tokens)
    tokens -= tokens % align_tokens
    return _known(tokens, 0, (tokens + block_tokens - 1) // block_tokens)


cdef int64_t _last_unit_of_block(
    const uint8_t[::1] states,
    int64_t max_tokens,
    int64_t hash_tokens,
    int64_t first_unit,
    int64_t scale,
) noexcept nogil:
    """Return the last stored boundary inside the block at ``first_unit``, as a hash index.

    -1 where none is stored, ``-2 - hash index`` where an answer is unknown. The end of the block
    is not inside it: the scan over whole blocks has read it.
    """
    cdef int64_t stop = min(first_unit + scale - 1, max_tokens // hash_tokens)
    cdef int64_t unit = min(stop, states.shape[0]) - 1
    while unit >= first_unit:
        if states[unit] == _PRESENT:
            return unit
        if states[unit] == _UNKNOWN:
            return -2 - unit
        unit -= 1
    return -1


cdef Hit _find_sliding_window(
    const uint8_t[::1] states,
    int64_t max_tokens,
    int64_t block_tokens,
    int64_t hash_tokens,
    int64_t align_tokens,
    bint drop_eagle,
    int64_t window_tokens,
) noexcept nogil:
    cdef int64_t scale = block_tokens // hash_tokens
    cdef int64_t step = max(<int64_t>1, align_tokens // block_tokens)
    cdef int64_t peek = 1 if drop_eagle else 0
    cdef int64_t wanted = max(
        <int64_t>1, (window_tokens - 1 + block_tokens - 1) // block_tokens + peek
    )
    cdef int64_t block = min(max_tokens // block_tokens, states.shape[0] // scale) - 1
    cdef int64_t run = 0
    cdef uint8_t state
    while block >= 0:
        if run == 0:  # a run ends on a boundary: blocks between boundaries are not even read
            block -= (block + 1 - peek) % step
            if block < peek:  # the boundary is token 0
                break
        state = states[(block + 1) * scale - 1]
        if state == _UNKNOWN:
            return _unknown((block + 1) * scale - 1)
        run = run + 1 if state == _PRESENT else 0
        if run == wanted:
            run += block - peek
            return _known(run * block_tokens, block, run)
        block -= 1
    run -= run % step
    if run > 0 and drop_eagle:
        run -= 1
        run -= run % step
    return _known(run * block_tokens, 0, run)


cdef Hit _find_chunked_local(
    const uint8_t[::1] states,
    int64_t max_tokens,
    int64_t block_tokens,
    int64_t hash_tokens,
    int64_t chunk_tokens,
) noexcept nogil:
    cdef int64_t scale = block_tokens // hash_tokens
    cdef int64_t limit = min(max_tokens // block_tokens, states.shape[0] // scale)
    cdef int64_t first = min(max_tokens // chunk_tokens * chunk_tokens // block_tokens, limit)
    cdef int64_t block = first
    cdef uint8_t state
    while block < limit:
        state = states[(block + 1) * scale - 1]
        if state == _UNKNOWN:
            return _unknown((block + 1) * scale - 1)
        if state == _ABSENT:
            break
        block += 1
    return _known(block * block_tokens, first, block)


cdef Hit _find_mamba(
    const uint8_t[::1] states,
    int64_t max_tokens,
    int64_t block_tokens,
    int64_t hash_tokens,
    int64_t align_tokens,
) noexcept nogil:
    cdef int64_t unit = align_tokens // hash_tokens  # hash units from one boundary to the next
    cdef int64_t boundary = min(max_tokens // hash_tokens, states.shape[0]) // unit
    cdef int64_t tokens, num_blocks
    cdef uint8_t state
    while boundary > 0:
        state = states[boundary * unit - 1]
        if state == _UNKNOWN:
            return _unknown(boundary * unit - 1)
        if state == _PRESENT:
            tokens = boundary * align_tokens
            num_blocks = (tokens + block_tokens - 1) // block_tokens
            return _known(tokens, num_blocks - 1, num_blocks)
        boundary -= 1
    return _known(0, 0, 0)
