# SPDX-License-Identifier: Apache-2.0
"""One set-up Mooncake client: its calls, each answered by codes whatever happens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvxfer.errors import StoreError
from kvxfer.stores.mooncake_codes import MISSING, NO_ANSWER, OK, name_of
from kvxfer.stores.mooncake_native import Replication, import_client, installed_builds
from kvxfer.stores.mooncake_options import MooncakeOptions

logger = logging.getLogger(__name__)


class Client:
    """Calls of ``MooncakeDistributedStore``, without the GIL, from any thread.

    A call that raises, or whose answer is None or short, is answered with ``NO_ANSWER`` for what
    it did not answer. No call may come after ``close``, nor run while it runs: the client's
    memory is gone then. Every call is bounded by the client's own timeouts. ``connect`` and
    ``close`` hold the GIL: 0.1 to 0.5 s where the master answers, 2 s to end a segment.
    """

    def __init__(self, native: Any, replication: Replication) -> None:
        self._native, self._replication = native, replication

    @classmethod
    def connect(cls, options: MooncakeOptions) -> Client:
        """Import and set up a client; ``StoreError`` where it refuses."""
        module = import_client()
        native = module.MooncakeDistributedStore()
        code = native.setup(
            options.hostname,
            options.metadata,
            options.segment_bytes,
            options.buffer_bytes,
            options.protocol,
            options.device,
            options.master,
            **_further_arguments(options),
        )
        if code != OK:
            raise StoreError(_refusal(options, code))
        return cls(native, Replication.probe(module, options))

    def exists(self, names: Sequence[str]) -> list[int]:
        """Return 1, 0 or an error code per name."""
        return self._codes(len(names), lambda: self._native.batch_is_exist(names))

    def get(self, names: Sequence[str], ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Copy values to addresses; return the bytes of each or an error code.

        The sizes must be those of the values: another one is an error, before a byte is written.
        """
        return self.get_parts(names, list(zip(ptrs)), list(zip(sizes)))

    def get_parts(
        self,
        names: Sequence[str],
        ptrs: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Copy each value to several addresses, as ``get`` to one."""
        return self._codes(
            len(names), lambda: self._native.batch_get_into_multi_buffers(names, ptrs, sizes)
        )

    def put(self, names: Sequence[str], ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Store copies of what lies at addresses; return 0, also where the name is there."""
        return self._codes(
            len(names),
            lambda: self._native.batch_put_from(
                names, ptrs, sizes, self._replication.config(names)
            ),
        )

    def put_parts(
        self,
        names: Sequence[str],
        ptrs: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Store each value from several addresses, as ``put`` from one."""
        return self._codes(
            len(names),
            lambda: self._native.batch_put_from_multi_buffers(
                names, ptrs, sizes, self._replication.config(names)
            ),
        )

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the bytes of each value, or an error code."""
        return [self._code(lambda name=name: self._native.get_size(name)) for name in names]  # type: ignore[misc]

    def remove(self, names: Sequence[str]) -> list[int]:
        """Remove values, leased ones too; return 0 or an error code per name."""
        return self._codes(len(names), lambda: self._native.batch_remove(names, True))

    def remove_matching(self, pattern: str) -> int:
        """Remove every name in which ``pattern`` is found; return how many, or an error code."""
        return self._code(lambda: self._native.remove_by_regex(pattern, True))

    def register(self, ptr: int, num_bytes: int) -> int:
        """Announce memory; return 0 or an error code."""
        return self._code(lambda: self._native.register_buffer(ptr, num_bytes))

    def unregister(self, ptr: int) -> int:
        """Take back ``register``."""
        return self._code(lambda: self._native.unregister_buffer(ptr))

    def close(self) -> None:
        """End the client and give its segment back."""
        self._code(self._native.close)

    def _code(self, call: Callable[[], Any]) -> int:
        return self._codes(1, lambda: [call()])[0]

    def _codes(self, num_names: int, call: Callable[[], Any]) -> list[int]:
        try:
            answer = list(call() or ())
        except Exception:
            logger.exception("a call of the Mooncake client raised")
            answer = []
        if len(answer) == num_names and set(map(type, answer)) <= {int}:
            return answer
        codes = [code if isinstance(code, int) else NO_ANSWER for code in answer[:num_names]]
        return codes + [NO_ANSWER] * (num_names - len(codes))


def sizes_by_name(client: Client, names: Sequence[str]) -> dict[str, int]:
    """Return the stored bytes of those names that the master knows."""
    sizes = zip(names, client.sizes(names), strict=True)
    return {name: size for name, size in sizes if size >= 0 and size != MISSING}


def _further_arguments(options: MooncakeOptions) -> dict[str, Any]:
    """Return the arguments that only some builds know, where they are asked for."""
    further: dict[str, Any] = {}
    if options.tenant != "default":
        further["tenant_id"] = options.tenant
    if options.ssd_offload_path is not None:
        further.update(enable_ssd_offload=True, ssd_offload_path=options.ssd_offload_path)
    if options.client_http_port is not None:
        further.update(enable_client_http_server=True, client_http_port=options.client_http_port)
    return further


def _refusal(options: MooncakeOptions, code: int) -> str:
    builds = installed_builds()
    if len(builds) > 1:
        return (
            f"the Mooncake client did not start ({name_of(code)}, {code}) and {len(builds)} builds "
            f"of it are installed over each other: {', '.join(builds)}; uninstall all, install one"
        )
    return (
        f"the Mooncake client ({', '.join(builds) or 'of unknown build'}) did not start: "
        f"{name_of(code)} ({code}). Master {options.master} answers; check that it is a "
        f"mooncake_master of the same version, that this build knows protocol={options.protocol} "
        f"and device={options.device!r}, that metadata={options.metadata} is what the master's "
        f"other clients use, and that {options.segment_bytes} bytes of memory are free. The "
        "client's own reason is above, on stderr."
    )
