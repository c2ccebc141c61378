# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of the lookup channel: asks, polls, and never waits unless told to."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import zmq

from kvxfer.errors import ProtocolError
from kvxfer.lookup import protocol
from kvxfer.lookup.endpoint import Endpoint
from kvxfer.lookup.hashes import Buffer, PackedHashes
from kvxfer.lookup.protocol import MessageType, Reply, Status

_RECONNECT_MS = 20  # a restarted server is found within one or two steps
_MAX_RECONNECT_MS = 500
_MAX_POLL_MS = 1000


@dataclass(frozen=True, slots=True)
class LookupReply:
    """What is stored of a prefix; with any status but ``OK`` nothing, which is a miss."""

    status: Status
    hit_length: int = 0
    tail_boundaries: tuple[tuple[int, int], ...] = ()
    """(group, tokens) for each group whose tail block is stored under another boundary."""


@dataclass(slots=True)
class LookupCounters:
    """What became of the questions, of all types, since the client was made."""

    sent: int = 0
    unsent: int = 0
    """Could not be sent: no server, or a full queue."""
    answered: int = 0
    """Replies that belonged to a question, whatever their status."""
    failed: int = 0
    """Of these, with a status other than ``OK``."""
    malformed: int = 0
    """Of the failed, and of the dropped: could not be read, or could not be true."""
    timed_out: int = 0
    late_dropped: int = 0
    """Replies to no open question: late, discarded or foreign."""


@dataclass(slots=True, eq=False)
class _Question:
    """One open question; ``request_id`` is None until it is sent, ``reply`` until it is settled."""

    reply_type: MessageType
    deadline_s: float
    key: str = ""
    num_tokens: int = 0
    request_id: int | None = None
    reply: LookupReply | None = None


class LookupClient:
    """Asks the lookup server how much of a request's prefix is stored.

    Scheduler side; one per engine; not thread-safe; not usable in a forked child. A late answer
    counts as a miss, because a miss only costs compute while a wait stalls every request of the
    step. It owns one DEALER socket and its context until ``close``; then every lookup is a miss.

    A question, by key:

        state      means                                        next
        deferred   ``max_in_flight`` others are in flight       a later call sends it
        in flight  sent, no reply yet                           reply, or deadline
        settled    reply in hand, or deadline passed            the next call hands it over

    The deadline runs from the first call, deferral included. What was queued for a server that
    died is dropped with its connection, so a restarted one never meets old questions. A reply
    to anything but an open question is dropped by its id.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout_s: float = 1.0,
        max_in_flight: int = 128,
        max_questions: int = 16384,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect in the background; the server may come later.

        ``max_in_flight`` bounds the questions sent and unanswered, ``max_questions`` all that
        are open. Raises ``ConfigError`` for a folder that others can enter.
        """
        endpoint.ensure_private_folder()
        self.endpoint = endpoint
        self.counters = LookupCounters()
        self._timeout_s = timeout_s
        self._max_in_flight = max_in_flight
        self._max_questions = max_questions
        self._clock = clock
        self._questions: dict[str, _Question] = {}  # lookups by key, in order of their deadlines
        self._in_flight: dict[int, _Question] = {}  # by request id, control messages included
        self._next_expiry_s = math.inf  # no deadline in _in_flight is earlier
        # Another client of the same server, one before a restart say, never shares an id.
        self._last_request_id = secrets.randbits(62)
        self._context = zmq.Context(io_threads=1)
        self._socket = _connect(self._context, endpoint, max_in_flight)

    def lookup(
        self, key: str, num_tokens: int, block_hashes: Sequence[bytes], *, blocking: bool = False
    ) -> LookupReply | None:
        """Return the answer to the question ``key``, or None while there is none yet.

        The first call asks, later ones poll, and the other arguments do not matter once the
        question is sent; the answer is handed over once and forgotten. ``num_tokens`` is the
        raw prompt length; ``block_hashes`` are of equal width, possibly packed already. Never
        blocks, unless ``blocking``: then it returns by the deadline, with an answer or a miss.
        What cannot be sent, for want of a server or of room in its queue, is a miss at once; a
        blocking call goes on trying. Raises ``ValueError`` for arguments beyond the protocol's
        bounds.
        """
        self._receive()
        question = self._questions.get(key)
        if question is None:
            question = self._open(key)
        if question.request_id is None and question.reply is None:
            question.num_tokens = num_tokens
            self._ask(question, block_hashes, blocking)
        if blocking and question.reply is None:
            self._wait(question, None)
        return self._collect(question)

    def discard(self, key: str) -> None:
        """Forget the question ``key``, in any state; its reply will be dropped. Unknown is fine."""
        question = self._questions.get(key)
        if question is not None:
            self._forget(question)

    def reset(self, timeout_s: float, *, epoch: int = 0, remove: bool = True) -> bool:
        """Have the server drain its saves and remove this engine's prefix; True when it did.

        ``epoch`` says which saves: those ordered before it. Without ``remove`` it only drains.
        Blocks up to ``timeout_s``. Lookups that are open now are forgotten, since their answers
        describe what the reset removes: asked again, they are sent again.
        """
        for question in list(self._questions.values()):
            self._forget(question)
        request_id = self._new_request_id()
        frames = protocol.encode_reset(request_id, epoch, remove, timeout_s)
        return self._control(MessageType.RESET_REPLY, request_id, frames, timeout_s)

    def ping(self, timeout_s: float) -> bool:
        """Return whether the server answers within ``timeout_s``; blocks until it does."""
        request_id = self._new_request_id()
        frames = protocol.encode_ping(request_id)
        return self._control(MessageType.PING_REPLY, request_id, frames, timeout_s)

    def send_key_spaces(self, payload: bytes, timeout_s: float) -> bool:
        """Hand the other ranks' key prefixes to the server; True when it took them.

        Blocks up to ``timeout_s``. Raises ``ProtocolError`` for an oversized payload.
        """
        request_id = self._new_request_id()
        frames = protocol.encode_key_spaces(request_id, payload)
        return self._control(MessageType.KEY_SPACES_REPLY, request_id, frames, timeout_s)

    @property
    def num_open(self) -> int:
        """Questions that are deferred, in flight or settled and not handed over yet."""
        return len(self._questions)

    @property
    def num_in_flight(self) -> int:
        """Questions sent, unanswered and still waited for."""
        return len(self._in_flight)

    def close(self) -> None:
        """Drop all questions and close the socket; idempotent, waits for nobody."""
        self._questions.clear()
        self._in_flight.clear()
        self._socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> LookupClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, key: str) -> _Question:
        """Return a new question, settled as unsent where too many are open."""
        now_s = self._clock()
        question = _Question(MessageType.LOOKUP_REPLY, now_s + self._timeout_s, key)
        if len(self._questions) >= self._max_questions:
            oldest = next(iter(self._questions.values()))
            if oldest.deadline_s > now_s:
                self._settle_unsent(question)
                return question
            self._forget(oldest)  # nobody asked for it any more
        self._questions[key] = question
        return question

    def _ask(self, question: _Question, block_hashes: Sequence[bytes], blocking: bool) -> None:
        """Send the question, or leave it deferred while too many are in flight."""
        if not blocking and len(self._in_flight) >= self._max_in_flight:
            self._expire()
            if len(self._in_flight) >= self._max_in_flight:
                return
        request_id = self._new_request_id()
        try:
            hashes = PackedHashes.pack(block_hashes)
            frames = protocol.encode_lookup(request_id, question.num_tokens, hashes)
        except ValueError:
            self._forget(question)
            raise
        if self._send(question, request_id, frames):
            return
        if blocking:
            self._wait(question, (request_id, frames))
        else:
            self._settle_unsent(question)

    def _control(
        self,
        reply_type: MessageType,
        request_id: int,
        frames: tuple[Buffer, ...],
        timeout_s: float,
    ) -> bool:
        """Send one control message and wait for its reply; False for anything but ``OK``."""
        question = _Question(reply_type, self._clock() + timeout_s)
        self._wait(question, (request_id, frames))
        reply = self._collect(question)
        return reply is not None and reply.status is Status.OK

    def _wait(self, question: _Question, unsent: tuple[int, tuple[Buffer, ...]] | None) -> None:
        """Block until the question is settled; ``unsent``, its id and frames, is sent first."""
        while not self._socket.closed:
            self._receive()
            if question.reply is not None:
                return
            if unsent is not None and self._send(question, *unsent):
                unsent = None
            remaining_s = question.deadline_s - self._clock()
            if remaining_s <= 0:
                break
            events = zmq.POLLIN if unsent is None else zmq.POLLIN | zmq.POLLOUT
            zmq.zmq_poll([(self._socket, events)], min(math.ceil(remaining_s * 1000), _MAX_POLL_MS))
        if unsent is None:
            self._settle_timed_out(question)
        else:
            self._settle_unsent(question)

    def _send(self, question: _Question, request_id: int, frames: tuple[Buffer, ...]) -> bool:
        """Send without blocking; False, and nothing sent, without a server or with a full queue."""
        try:
            # Frame by frame: send_multipart costs more than both sends. Copied, although the
            # hashes may be large: pyzmq's zero-copy send is slower end to end and adds a thread.
            for frame in frames[:-1]:
                self._socket.send(frame, zmq.DONTWAIT | zmq.SNDMORE)
            self._socket.send(frames[-1], zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            if not self._socket.closed:
                raise
            return False
        self.counters.sent += 1
        question.request_id = request_id
        self._in_flight[request_id] = question
        self._next_expiry_s = min(self._next_expiry_s, question.deadline_s)
        return True

    def _receive(self) -> None:
        """Take the replies that have arrived, as many as the socket's queue holds at most.

        However fast more of them come, the call that looks returns.
        """
        if self._socket.closed:
            return
        for _ in range(_queue_length(self._max_in_flight)):
            # Asking for the events also lets ZMQ notice connections, which sends rely on.
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            self._take(self._socket.recv_multipart(zmq.DONTWAIT))

    def _take(self, frames: list[bytes]) -> None:
        """Settle the question that a reply belongs to; drop a reply that belongs to none."""
        try:
            reply = protocol.decode_reply(frames)
        except ProtocolError:
            reply = Reply(
                MessageType.MALFORMED_REPLY,
                protocol.peek_request_id(frames) or 0,
                Status.MALFORMED,
            )
            self.counters.malformed += 1
        question = self._in_flight.pop(reply.request_id, None)
        if question is None:
            self.counters.late_dropped += 1
            return
        question.reply = self._believe(question, reply)
        self.counters.answered += 1
        self.counters.failed += question.reply.status is not Status.OK

    def _believe(self, question: _Question, reply: Reply) -> LookupReply:
        """Return the reply as it is handed over: malformed if it does not fit the question."""
        if reply.status is not Status.OK:
            return LookupReply(reply.status)
        if reply.message_type is question.reply_type and reply.hit_length <= question.num_tokens:
            return LookupReply(Status.OK, reply.hit_length, reply.tail_boundaries)
        self.counters.malformed += 1
        return LookupReply(Status.MALFORMED)

    def _collect(self, question: _Question) -> LookupReply | None:
        """Hand over a settled question and forget it; None while it is open."""
        if question.reply is None and self._clock() >= question.deadline_s:
            self._settle_timed_out(question)
        if question.reply is not None:
            self._forget(question)
        return question.reply

    def _expire(self) -> None:
        """Settle what is in flight past its deadline, which makes room for others."""
        now_s = self._clock()
        if now_s < self._next_expiry_s:
            return
        for question in list(self._in_flight.values()):
            if question.deadline_s <= now_s:
                self._settle_timed_out(question)
        deadlines_s = (question.deadline_s for question in self._in_flight.values())
        self._next_expiry_s = min(deadlines_s, default=math.inf)

    def _settle_timed_out(self, question: _Question) -> None:
        self.counters.timed_out += 1
        self._settle_missed(question, Status.TIMED_OUT)

    def _settle_unsent(self, question: _Question) -> None:
        self.counters.unsent += 1
        self._settle_missed(question, Status.UNSENT)

    def _settle_missed(self, question: _Question, status: Status) -> None:
        question.reply = LookupReply(status)
        if question.request_id is not None:
            self._in_flight.pop(question.request_id, None)

    def _forget(self, question: _Question) -> None:
        # By identity: a question settled as unsent may never have been entered.
        if self._questions.get(question.key) is question:
            del self._questions[question.key]
        if question.request_id is not None:
            self._in_flight.pop(question.request_id, None)

    def _new_request_id(self) -> int:
        self._last_request_id += 1
        return self._last_request_id


def _queue_length(max_in_flight: int) -> int:
    """Return the messages that one of the socket's queues holds.

    A queue learns what was taken from it half a queue at a time: twice the bound always has room
    for what may be in flight, and some for control messages.
    """
    return 2 * max_in_flight + 4


def _connect(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, max_in_flight: int
) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    # Only a completed connection takes messages, and what it has not delivered dies with it:
    # nothing is queued for a server that is not there.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.SNDHWM, _queue_length(max_in_flight))
    socket.setsockopt(zmq.RCVHWM, _queue_length(max_in_flight))
    # No MAXMSGSIZE here: a connecting socket never reconnects after an oversized message.
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
    socket.connect(endpoint.url)
    return socket
