# SPDX-License-Identifier: Apache-2.0
"""The worker side of the lookup channel: a thread that answers everything, errors included."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import zmq

from kvxfer.errors import ProtocolError, UnsupportedError
from kvxfer.lookup import protocol
from kvxfer.lookup.endpoint import Endpoint, Listener
from kvxfer.lookup.hashes import PackedHashes
from kvxfer.lookup.protocol import (
    KeySpacesRequest,
    LookupRequest,
    MessageType,
    Reply,
    Request,
    ResetRequest,
    Status,
)

logger = logging.getLogger(__name__)

OnLookup = Callable[[int, PackedHashes], tuple[int, Sequence[tuple[int, int]]]]
OnReset = Callable[[int, bool, float], bool]
OnKeySpaces = Callable[[bytes], None]

_LOG_INTERVAL_S = 10.0
# Per client, tens of bytes each; what a client leaves unread beyond that is lost. Far more than
# a client has in flight, because a queue learns what was taken from it half a queue at a time.
_MAX_UNREAD_REPLIES = 4096


@dataclass(slots=True)
class ServerCounters:
    """What was received and answered since the server was made."""

    lookups: int = 0
    failed: int = 0
    """Handlers that raised, or refused, or whose answer could not be encoded."""
    malformed: int = 0
    not_ready: int = 0
    """Requests refused because a reset was running."""
    resets: int = 0
    abandoned: int = 0
    """Threads that were still inside a handler when ``close`` gave up on them."""


class LookupServer:
    """Answers the lookup client of one engine, from the worker of rank 0.

    Owns the endpoint's file, a context with a ROUTER socket and the thread ``kvxfer-lookup``,
    which runs the handlers one after the other; requests wait in the socket's bounded queue. A
    handler that raises is logged, at most once in ten seconds, and answered as ``FAILED``; the
    next request is normal. A malformed request is answered where its id can be read.

    - ``on_lookup(num_tokens, hashes)`` returns the hit length and (group, tokens) pairs. The
      hashes view the received message: to keep them is to keep its memory.
    - ``on_reset(epoch, remove, timeout_s)`` drains the saves ordered before ``epoch``, then
      removes this engine's prefix if ``remove``. It returns whether it did all of that, in about
      ``timeout_s``, the time that the client waits. It runs in a thread of its own,
      ``kvxfer-lookup-reset``. Until it returns, lookups and key spaces are answered ``NOT_READY``
      at once: a hit computed from what is being removed must not outlive the reset.
    - ``on_key_spaces(payload)`` takes the other ranks' key prefixes, or raises. Without this
      handler they are refused.

    No two handlers ever run at the same time. ``close`` ends the threads and removes the file,
    in bounded time; not to be called by a handler. The server does not survive a fork: make it
    after forking. In a forked child ``close`` does nothing, and the file stays the parent's.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_lookup: OnLookup,
        on_reset: OnReset,
        on_key_spaces: OnKeySpaces | None = None,
        *,
        max_queued: int = 128,
        close_timeout_s: float = 5.0,
    ) -> None:
        """Claim the endpoint and start to serve.

        ``max_queued`` bounds the requests waiting per client. Raises ``ConfigError`` where the
        endpoint is served already or its folder is open to others.
        """
        self.endpoint = endpoint
        self.counters = ServerCounters()  # written by the serving thread; abandoned by close
        self._on_lookup = on_lookup
        self._on_reset = on_reset
        self._on_key_spaces = on_key_spaces
        self._close_timeout_s = close_timeout_s
        self._failure_log = _QuietLog(_LOG_INTERVAL_S)
        self._malformed_log = _QuietLog(_LOG_INTERVAL_S)
        self._closing = threading.Event()
        self._owner_pid = os.getpid()
        self._reset_thread: threading.Thread | None = None
        self._finished_resets: collections.deque[tuple[bytes, Reply]] = collections.deque()
        with contextlib.ExitStack() as undo:
            self._listener = endpoint.listen()
            undo.callback(self._listener.remove_file)
            self._wakeup = undo.enter_context(_Wakeup())
            self._context = undo.enter_context(zmq.Context(io_threads=1))
            self._router = _bind(self._context, self._listener, max_queued)
            self._thread = threading.Thread(target=self._serve, name="kvxfer-lookup", daemon=True)
            self._thread.start()
            undo.pop_all()

    def close(self, timeout_s: float | None = None) -> None:
        """Stop serving, join the threads and remove the file; idempotent.

        Waits at most ``timeout_s`` (default: ``close_timeout_s``) for a handler that is running.
        After that its thread is abandoned, logged and counted; the endpoint is free again, and
        the thread releases the socket and the context itself when the handler returns.
        """
        if os.getpid() != self._owner_pid:
            return
        self._listener.remove_file()
        self._closing.set()
        self._wakeup.set()
        deadline_s = time.monotonic() + (self._close_timeout_s if timeout_s is None else timeout_s)
        joined = self._join(self._thread, deadline_s)
        # Read once the serving thread has ended: until then it may still start a reset.
        reset_joined = self._reset_thread is None or self._join(self._reset_thread, deadline_s)
        self.counters.abandoned = (not joined) + (not reset_joined)
        self._wakeup.close_writer()

    def __enter__(self) -> LookupServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _join(self, thread: threading.Thread, deadline_s: float) -> bool:
        thread.join(max(0.0, deadline_s - time.monotonic()))
        if thread.is_alive():
            logger.warning("lookup server closed, thread %s is still in a handler", thread.name)
            return False
        return True

    # The serving thread.

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wakeup.reader, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                for source, _ in poller.poll():
                    if source is self._router:
                        self._answer_next()
                    else:
                        self._finish_resets()
        except zmq.ZMQError:
            logger.exception("lookup server on %s stopped: lookups will miss", self.endpoint.path)
        finally:
            self._listener.remove_file()
            self._router.close(linger=0)
            self._context.term()
            self._wakeup.close_reader()

    def _answer_next(self) -> None:
        identity, *frames = self._router.recv_multipart(zmq.DONTWAIT, copy=False)
        reply = self._dispatch(identity.bytes, [frame.buffer for frame in frames])
        if reply is not None:
            self._send(identity.bytes, reply)

    def _send(self, identity: bytes, reply: bytes) -> None:
        # A client that is gone, or does not read, loses its reply: ROUTER drops it.
        self._router.send(identity, zmq.DONTWAIT | zmq.SNDMORE)
        self._router.send(reply, zmq.DONTWAIT)

    def _dispatch(self, identity: bytes, frames: list[memoryview]) -> bytes | None:
        """Return the reply frame, or None where none is due, or not yet."""
        try:
            request = protocol.decode_request(frames)
        except ProtocolError as error:
            return self._refuse_malformed(frames, error)
        if self._reset_thread is not None and not isinstance(request, protocol.PingRequest):
            self.counters.not_ready += 1
            return _reply_to(request, Status.NOT_READY)
        try:
            return self._handle(identity, request)
        except Exception as error:  # noqa: BLE001  # whatever a handler raises is a miss
            self.counters.failed += 1
            self._failure_log.warning("lookup channel: a handler failed", error)
            return _reply_to(request, Status.FAILED)

    def _handle(self, identity: bytes, request: Request) -> bytes | None:
        if isinstance(request, ResetRequest):
            self._start_reset(identity, request)
            return None
        if isinstance(request, LookupRequest):
            self.counters.lookups += 1
            hit_length, tails = self._on_lookup(request.num_tokens, request.hashes)
            reply_type, request_id = request.reply_type, request.request_id
            return protocol.encode_reply(
                Reply(reply_type, request_id, Status.OK, hit_length, tuple(tails))
            )
        if isinstance(request, KeySpacesRequest):
            if self._on_key_spaces is None:
                raise UnsupportedError("this server takes no key spaces")
            self._on_key_spaces(bytes(request.payload))
        return _reply_to(request, Status.OK)

    def _refuse_malformed(self, frames: list[memoryview], error: ProtocolError) -> bytes | None:
        self.counters.malformed += 1
        self._malformed_log.warning("lookup channel: malformed request", error)
        request_id = protocol.peek_request_id(frames)
        if request_id is None:
            return None
        return protocol.encode_reply(
            Reply(MessageType.MALFORMED_REPLY, request_id, Status.MALFORMED)
        )

    def _start_reset(self, identity: bytes, request: ResetRequest) -> None:
        self.counters.resets += 1
        thread = threading.Thread(
            target=self._run_reset,
            args=(identity, request),
            name="kvxfer-lookup-reset",
            daemon=True,
        )
        thread.start()
        self._reset_thread = thread

    def _finish_resets(self) -> None:
        self._wakeup.clear()
        while self._finished_resets:
            identity, reply = self._finished_resets.popleft()
            self.counters.failed += reply.status is not Status.OK
            if self._reset_thread is not None:
                self._reset_thread.join()  # at once: its last act was to wake this one
                self._reset_thread = None
            self._send(identity, protocol.encode_reply(reply))

    # The reset thread.

    def _run_reset(self, identity: bytes, request: ResetRequest) -> None:
        status = Status.FAILED
        try:
            if self._on_reset(request.epoch, request.remove, request.timeout_s):
                status = Status.OK
            else:
                logger.warning("reset: the handler did not finish")
        except Exception:
            logger.exception("reset: the handler failed")
        reply = Reply(MessageType.RESET_REPLY, request.request_id, status)
        self._finished_resets.append((identity, reply))
        self._wakeup.set()


class _Wakeup:
    """Wakes a poll from any thread; the poller owns ``reader``, everybody else may ``set``."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._writer_open = True  # guarded by _lock

    def set(self) -> None:
        with self._lock:
            if self._writer_open:
                # Full: awake already. Broken: the poller is gone.
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.reader.recv(64):
                pass

    def __enter__(self) -> _Wakeup:
        return self

    def __exit__(self, *error: object) -> None:
        self.close_writer()
        self.close_reader()

    def close_writer(self) -> None:
        with self._lock:
            self._writer_open = False
            self._writer.close()

    def close_reader(self) -> None:
        self.reader.close()


class _QuietLog:
    """Logs the first warning, then at most one in ``interval_s`` and how many were left out."""

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = float("-inf")
        self._num_left_out = 0

    def warning(self, message: str, error: Exception) -> None:
        now_s = self._clock()
        if now_s < self._next_s:
            self._num_left_out += 1
            return
        logger.warning(
            "%s: %r (%d more since the last report)",
            message,
            error,
            self._num_left_out,
            exc_info=error,
        )
        self._next_s = now_s + self._interval_s
        self._num_left_out = 0


def _reply_to(request: Request, status: Status) -> bytes:
    """Return the reply frame to a request that was read, without a hit."""
    return protocol.encode_reply(Reply(request.reply_type, request.request_id, status))


def _bind(
    context: zmq.Context[zmq.Socket[bytes]], listener: Listener, max_queued: int
) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.RCVHWM, max_queued)
    router.setsockopt(zmq.SNDHWM, _MAX_UNREAD_REPLIES)
    router.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_BODY_BYTES)
    # Given a listening descriptor, ZMQ leaves the file alone. Left to itself it would unlink
    # whatever lies there before it binds, a live server's file too.
    router.setsockopt(zmq.USE_FD, listener.detach())
    router.bind(f"ipc://{listener.path}")
    return router
