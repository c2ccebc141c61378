# SPDX-License-Identifier: Apache-2.0
"""A Mooncake client that lives in a dict, and answers as a test has it answer."""

from __future__ import annotations

import ctypes
import re
import threading
from collections import defaultdict
from types import SimpleNamespace

from kvxfer.stores.mooncake import MooncakeStore
from kvxfer.stores.uri import parse_uri

MISSING = -704


class FakeNative:
    """The calls that kvxfer makes, with their codes; ``scripts`` maps a call to what it does.

    A script is called with the call's arguments; what it returns is the answer, unless it is
    ``...``, for the usual one. ``calls`` counts, ``setup_codes`` are the answers of set-ups.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.regions: dict[int, int] = {}
        self.scripts = {}
        self.calls = defaultdict(list)
        self.setup_codes: list[int] = []
        self.configs = []
        self.lock = threading.Lock()

    def setup(self, *arguments, **further):
        self.calls["setup"].append((arguments, further))
        return self.setup_codes.pop(0) if self.setup_codes else 0

    def close(self):
        self.calls["close"].append(())
        return 0

    def register_buffer(self, ptr, size):
        if (answer := self._script("register", ptr, size)) is not ...:
            return answer
        self.regions[ptr] = size
        return 0

    def unregister_buffer(self, ptr):
        del self.regions[ptr]
        return 0

    def batch_is_exist(self, names):
        if (answer := self._script("exists", names)) is not ...:
            return answer
        return [int(name in self.values) for name in names]

    def get_size(self, name):
        self.calls["size"].append((name,))
        return len(self.values[name]) if name in self.values else MISSING

    def batch_get_into_multi_buffers(self, names, all_ptrs, all_sizes):
        assert len(set(names)) == len(names)
        if (answer := self._script("get", names, all_ptrs, all_sizes)) is not ...:
            return answer
        places = zip(names, all_ptrs, all_sizes, strict=True)
        return [self._get(name, ptrs, sizes) for name, ptrs, sizes in places]

    def batch_put_from_multi_buffers(self, names, all_ptrs, all_sizes, config):
        self.configs.append(config)
        if (answer := self._script("put", names, all_ptrs, all_sizes)) is not ...:
            return answer
        for name, ptrs, sizes in zip(names, all_ptrs, all_sizes, strict=True):
            self.values.setdefault(name, b"".join(map(self._read, ptrs, sizes)))
        return [0] * len(names)

    def batch_put_from(self, names, ptrs, sizes, config):
        self.configs.append(config)
        if (answer := self._script("put", names, ptrs, sizes)) is not ...:
            return answer
        for name, ptr, size in zip(names, ptrs, sizes, strict=True):
            self.values.setdefault(name, self._read(ptr, size))
        return [0] * len(names)

    def batch_remove(self, names, force):
        assert force
        if (answer := self._script("remove", names)) is not ...:
            return answer
        return [0 if self.values.pop(name, None) is not None else MISSING for name in names]

    def remove_by_regex(self, pattern, force):
        assert force
        if (answer := self._script("regex", pattern)) is not ...:
            return answer
        doomed = [name for name in self.values if re.search(pattern, name)]
        for name in doomed:
            del self.values[name]
        return len(doomed)

    def is_registered(self, ptr, size):
        return any(at <= ptr and ptr + size <= at + n for at, n in self.regions.items())

    def _read(self, ptr, size):
        assert self.is_registered(ptr, size)
        return ctypes.string_at(ptr, size)

    def _get(self, name, ptrs, sizes):
        assert all(map(self.is_registered, ptrs, sizes))
        value, total = self.values.get(name), sum(sizes)
        if value is None:
            return MISSING
        if len(value) != total:
            return -600 if total < len(value) else -800
        for ptr, size in zip(ptrs, sizes, strict=True):
            ctypes.memmove(ptr, value[:size], size)
            value = value[size:]
        return total

    def _script(self, call, *arguments):
        with self.lock:
            self.calls[call].append(arguments)
        script = self.scripts.get(call)
        return script(*arguments) if script else ...


def fake_module(native, **features):
    """Return a ``mooncake.store`` whose stores are ``native``; ``features`` of ReplicateConfig."""
    return SimpleNamespace(
        MooncakeDistributedStore=lambda: native,
        ReplicateConfig=lambda: SimpleNamespace(replica_num=1, **features),
        SoftPinAction=SimpleNamespace(ENABLE="enable"),
    )


def open_fake(monkeypatch, native, query="", **features):
    """Return a store over ``native``; its master is always reachable."""
    module = fake_module(native, **features)
    monkeypatch.setattr("kvxfer.stores.mooncake_client.import_client", lambda: module)
    monkeypatch.setattr("kvxfer.stores.mooncake.check_reachable", lambda options: None)
    monkeypatch.setattr("kvxfer.stores.mooncake.is_reachable", lambda master: True)
    uri = f"mooncake://127.0.0.1:1?segment=0&check=no&metrics_port=1&timeout_s=1&{query}"
    return MooncakeStore.open(parse_uri(uri.rstrip("&")))
