# SPDX-License-Identifier: Apache-2.0
"""Store keys from packed block hashes: a cached prefix, then the hash in hexadecimal."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy


def build_keys(bytes prefix, const uint8_t[::1] hashes, Py_ssize_t hash_bytes,
               const int32_t[::1] hash_idx):
    """Return ``prefix + hashes[i].hex()`` for every ``i`` of ``hash_idx``, in its order.

    ``hashes`` (n * hash_bytes,) uint8: hashes back to back. ``hash_idx`` (m,) int32, each in
    [0, n). Raises IndexError for the first index outside, ValueError for a torn buffer.
    """
    return build_shard_keys((prefix,), hashes, hash_bytes, hash_idx)


def build_shard_keys(tuple prefixes, const uint8_t[::1] hashes, Py_ssize_t hash_bytes,
                     const int32_t[::1] hash_idx):
    """Return ``prefix + hashes[i].hex()`` for every ``i``, for every prefix: a chunk's together.

    Entry ``j * len(prefixes) + p`` is that of ``hash_idx[j]`` and ``prefixes[p]``. Arguments and
    errors as for ``build_keys``.
    """
    cdef Py_ssize_t num_prefixes = len(prefixes), num_hashes, bad, i, shard
    cdef bytes prefix, first
    if hash_bytes <= 0:
        raise ValueError(f"hash_bytes is {hash_bytes}, must be positive")
    if hashes.shape[0] % hash_bytes:
        raise ValueError(f"hashes has {hashes.shape[0]} bytes, no multiple of {hash_bytes}")
    num_hashes = hashes.shape[0] // hash_bytes
    with nogil:
        bad = _first_outside(hash_idx, num_hashes)
    if bad >= 0:
        raise IndexError(f"hash_idx[{bad}] is {hash_idx[bad]}, there are {num_hashes} hashes")
    cdef list keys = [None] * (hash_idx.shape[0] * num_prefixes)
    for i in range(hash_idx.shape[0]):
        for shard in range(num_prefixes):
            prefix = prefixes[shard]
            if shard == 0:
                first = _key(prefix, &hashes[hash_idx[i] * hash_bytes], hash_bytes)
                keys[i * num_prefixes] = first
            else:
                keys[i * num_prefixes + shard] = _key_as(prefix, first, hash_bytes)
    return keys


def pack_hashes(list block_hashes, const int32_t[::1] hash_idx):
    """Return ``block_hashes[i]`` for every ``i`` of ``hash_idx``, back to back.

    ``block_hashes``: bytes objects of one length. ``hash_idx`` (m,) int32. Raises IndexError for
    the first index outside the list, ValueError for a hash of another length than the first.
    """
    cdef Py_ssize_t num = hash_idx.shape[0], bad, width, i
    cdef bytes one, packed
    cdef Py_ssize_t num_hashes = len(block_hashes)
    with nogil:
        bad = _first_outside(hash_idx, num_hashes)
    if bad >= 0:
        raise IndexError(
            f"hash_idx[{bad}] is {hash_idx[bad]}, there are {num_hashes} hashes"
        )
    if num == 0:
        return b""
    width = len(block_hashes[hash_idx[0]])
    packed = PyBytes_FromStringAndSize(NULL, width * num)
    cdef char *target = PyBytes_AS_STRING(packed)
    for i in range(num):
        one = block_hashes[hash_idx[i]]
        if len(one) != width:
            raise ValueError(
                f"block_hashes[{hash_idx[i]}] has {len(one)} bytes, another one {width}"
            )
        memcpy(target + i * width, PyBytes_AS_STRING(one), width)
    return packed


cdef Py_ssize_t _first_outside(const int32_t[::1] idx, Py_ssize_t bound) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(idx.shape[0]):
        if idx[i] < 0 or idx[i] >= bound:
            return i
    return -1


cdef bytes _key(bytes prefix, const uint8_t *hash_ptr, Py_ssize_t hash_bytes):
    cdef Py_ssize_t prefix_bytes = len(prefix)
    cdef bytes key = PyBytes_FromStringAndSize(NULL, prefix_bytes + 2 * hash_bytes)
    cdef char *out = PyBytes_AS_STRING(key)
    memcpy(out, PyBytes_AS_STRING(prefix), prefix_bytes)
    _write_hex(hash_ptr, hash_bytes, out + prefix_bytes)
    return key


cdef bytes _key_as(bytes prefix, bytes other, Py_ssize_t hash_bytes):
    """Return the key of the hash that ends ``other``, after another prefix."""
    cdef Py_ssize_t prefix_bytes = len(prefix), hex_bytes = 2 * hash_bytes
    cdef bytes key = PyBytes_FromStringAndSize(NULL, prefix_bytes + hex_bytes)
    cdef char *out = PyBytes_AS_STRING(key)
    memcpy(out, PyBytes_AS_STRING(prefix), prefix_bytes)
    memcpy(out + prefix_bytes, PyBytes_AS_STRING(other) + len(other) - hex_bytes, hex_bytes)
    return key


cdef void _write_hex(const uint8_t *source, Py_ssize_t num_bytes, char *out) noexcept nogil:
    """Write two digits a byte, four bytes at a time: one nibble to a byte of a 64-bit word."""
    cdef Py_ssize_t i = 0
    cdef uint32_t four
    cdef uint64_t word, high, nibbles
    while i + 4 <= num_bytes:
        memcpy(&four, source + i, 4)
        word = four
        word = (word | (word << 16)) & 0x0000FFFF0000FFFFULL
        word = (word | (word << 8)) & 0x00FF00FF00FF00FFULL
        high = (word >> 4) & 0x000F000F000F000FULL
        nibbles = high | ((word & 0x000F000F000F000FULL) << 8)
        # '0' to '9' follow one another, 'a' comes 39 after '9' + 1.
        word = nibbles + 0x3030303030303030ULL
        word += (((nibbles + 0x0606060606060606ULL) >> 4) & 0x0101010101010101ULL) * 39
        memcpy(out + 2 * i, &word, 8)
        i += 4
    while i < num_bytes:
        out[2 * i] = _digit(source[i] >> 4)
        out[2 * i + 1] = _digit(source[i] & 15)
        i += 1


cdef inline char _digit(int nibble) noexcept nogil:
    return 48 + nibble if nibble < 10 else 87 + nibble
