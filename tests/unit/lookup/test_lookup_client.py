# SPDX-License-Identifier: Apache-2.0
"""The client against a bare socket: what it sends, what it believes, and what it forgets."""

import threading

import pytest

from kvxfer.errors import ConfigError, ProtocolError
from kvxfer.lookup import LookupClient, LookupReply, PackedHashes, Status, protocol
from kvxfer.lookup.protocol import MessageType

HASHES = [bytes([number]) * 32 for number in range(4)]
MISS_UNSENT = LookupReply(Status.UNSENT)
MISS_TIMED_OUT = LookupReply(Status.TIMED_OUT)


def ask(client, raw_server, key="a", num_tokens=64):
    """Send a question that stays open; return (sender, request) as the server got it."""
    assert client.lookup(key, num_tokens, HASHES) is None
    return raw_server.receive()


def await_reply(client, key="a"):
    """Return the reply to an open question, which is on its way."""
    return client.lookup(key, 0, [], blocking=True)


def assert_nothing_open(client):
    assert (client.num_open, client.num_in_flight) == (0, 0)


def test_lookup_sends_the_raw_length_and_the_hashes(connected, raw_server):
    _, request = ask(connected(), raw_server, num_tokens=65)
    assert request.num_tokens == 65
    assert list(request.hashes) == HASHES


def test_lookup_sends_packed_hashes_as_they_are(connected, raw_server):
    client = connected()
    assert client.lookup("a", 64, PackedHashes.pack(HASHES)[1:3]) is None
    assert list(raw_server.receive()[1].hashes) == HASHES[1:3]


def test_lookup_hands_an_answer_over_once_and_forgets_it(connected, raw_server):
    client = connected()
    raw_server.reply(*ask(client, raw_server), hit_length=48, tails=((1, 40), (2, 32)))
    assert await_reply(client) == LookupReply(Status.OK, 48, ((1, 40), (2, 32)))
    assert_nothing_open(client)
    ask(client, raw_server)  # the same key asks anew
    assert (client.counters.sent, client.counters.answered) == (2, 1)


def test_lookup_polls_without_sending_again(connected, raw_server):
    client = connected()
    ask(client, raw_server)
    assert [client.lookup("a", 64, HASHES) for _ in range(5)] == [None] * 5
    assert not raw_server.pending()


def test_lookups_are_answered_in_any_order(connected, raw_server):
    client = connected()
    first, second = ask(client, raw_server, "a"), ask(client, raw_server, "b")
    raw_server.reply(*second, hit_length=32)
    raw_server.reply(*first, hit_length=16)
    assert await_reply(client, "a").hit_length == 16
    assert await_reply(client, "b").hit_length == 32


def test_lookup_without_a_server_is_a_miss_at_once(make_client):
    client = make_client()
    assert client.lookup("a", 64, HASHES) == MISS_UNSENT
    assert client.counters.unsent == 1
    assert_nothing_open(client)


def test_lookup_becomes_a_miss_at_its_deadline(connected, raw_server, clock):
    client = connected(timeout_s=2.0)
    ask(client, raw_server)
    clock.now_s += 1.999
    assert client.lookup("a", 64, HASHES) is None
    clock.now_s += 0.001
    assert client.lookup("a", 64, HASHES) == MISS_TIMED_OUT
    assert client.counters.timed_out == 1
    assert_nothing_open(client)


def test_late_reply_never_answers_the_next_question(connected, raw_server, clock):
    client = connected()
    late = ask(client, raw_server)
    clock.now_s += 1
    assert client.lookup("a", 64, HASHES) == MISS_TIMED_OUT
    question = ask(client, raw_server)
    raw_server.reply(*late, hit_length=64)
    raw_server.reply(*question, hit_length=16)
    assert await_reply(client).hit_length == 16
    assert client.counters.late_dropped == 1


def test_reply_that_arrived_before_the_client_looked_counts(connected, raw_server, clock):
    client = connected()
    first, second = ask(client, raw_server, "a"), ask(client, raw_server, "b")
    raw_server.reply(*first, hit_length=16)
    raw_server.reply(*second, hit_length=32)
    assert await_reply(client, "b").hit_length == 32  # so that the other has arrived, too
    clock.now_s += 100
    assert client.lookup("a", 64, HASHES).hit_length == 16


def test_foreign_reply_is_dropped(connected, raw_server):
    client = connected()
    sender, request = ask(client, raw_server)
    foreign = protocol.LookupRequest(request.request_id + 1, 64, request.hashes)
    raw_server.reply(sender, foreign, hit_length=64)
    raw_server.reply(sender, request, hit_length=16)
    assert await_reply(client).hit_length == 16
    assert client.counters.late_dropped == 1


def test_clients_do_not_share_request_ids(connected, raw_server):
    ids = {ask(connected(), raw_server)[1].request_id for _ in range(4)}
    assert max(ids) - min(ids) > 1000


@pytest.mark.parametrize("status", [Status.FAILED, Status.NOT_READY, Status.MALFORMED])
def test_reply_with_a_failure_is_a_miss(connected, raw_server, status):
    client = connected()
    raw_server.reply(*ask(client, raw_server), status=status)
    assert await_reply(client) == LookupReply(status)
    assert client.counters.failed == 1


@pytest.mark.parametrize(
    "options",
    [{"hit_length": 65}, {"kind": MessageType.PING_REPLY}, {"kind": MessageType.MALFORMED_REPLY}],
    ids=["hit_beyond_the_prompt", "type_of_another_question", "ok_to_something_unread"],
)
def test_reply_that_cannot_be_true_is_a_miss(connected, raw_server, options):
    client = connected()
    raw_server.reply(*ask(client, raw_server, num_tokens=64), **options)
    assert await_reply(client) == LookupReply(Status.MALFORMED)
    assert client.counters.malformed == 1
    assert_nothing_open(client)


def test_malformed_reply_with_an_id_settles_its_question(connected, raw_server):
    client = connected()
    sender, request = ask(client, raw_server)
    raw_server.send(sender, protocol.encode_ping(request.request_id)[0])
    assert await_reply(client) == LookupReply(Status.MALFORMED)


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"kx"], [b"", b""], [b"garbage" * 9], [bytes(2**20)]],
    ids=["empty", "cut_short", "two_frames", "garbage", "large"],
)
def test_malformed_reply_without_an_id_is_dropped(connected, raw_server, frames):
    client = connected()
    sender, request = ask(client, raw_server)
    raw_server.send(sender, *frames)
    raw_server.reply(sender, request, hit_length=16)
    assert await_reply(client).hit_length == 16
    assert (client.counters.malformed, client.counters.late_dropped) == (1, 1)


def test_question_beyond_the_bound_is_deferred_not_missed(connected, raw_server):
    client = connected(max_in_flight=2)
    first = ask(client, raw_server, "a")
    ask(client, raw_server, "b")
    assert client.lookup("c", 64, HASHES) is None
    assert (client.num_open, client.num_in_flight) == (3, 2)
    assert not raw_server.pending()
    raw_server.reply(*first, hit_length=16)
    assert await_reply(client, "a").hit_length == 16
    ask(client, raw_server, "c")


def test_deferred_question_is_asked_as_of_its_sending(connected, raw_server):
    client = connected(max_in_flight=1)
    ask(client, raw_server, "a")
    assert client.lookup("b", 64, HASHES) is None
    client.discard("a")
    assert client.lookup("b", 80, HASHES[:2]) is None
    _, request = raw_server.receive()
    assert (request.num_tokens, list(request.hashes)) == (80, HASHES[:2])


def test_deferred_question_becomes_a_miss_at_its_deadline(connected, raw_server, clock):
    client = connected(max_in_flight=1)
    ask(client, raw_server, "a")
    assert client.lookup("b", 64, HASHES) is None
    clock.now_s += 0.5
    client.discard("a")
    ask(client, raw_server, "c")
    clock.now_s += 0.5
    assert client.lookup("b", 64, HASHES) == MISS_TIMED_OUT
    assert client.lookup("c", 64, HASHES) is None


def test_questions_that_nobody_polls_make_room_after_their_deadline(connected, raw_server, clock):
    client = connected(max_in_flight=2)
    ask(client, raw_server, "a")
    ask(client, raw_server, "b")
    clock.now_s += 1
    ask(client, raw_server, "c")
    assert client.num_in_flight == 1
    # They are misses when somebody polls after all, and not asked again.
    assert client.lookup("a", 64, HASHES) == MISS_TIMED_OUT


def test_open_questions_are_bounded(connected, raw_server, clock):
    client = connected(max_in_flight=1, max_questions=3)
    ask(client, raw_server, "a")
    assert [client.lookup(key, 64, HASHES) for key in "bc"] == [None, None]
    assert client.lookup("d", 64, HASHES) == MISS_UNSENT
    clock.now_s += 1
    ask(client, raw_server, "e")
    assert client.num_open == 3


def test_server_that_does_not_read_costs_misses_not_memory(connected, raw_server):
    client = connected(max_in_flight=8)
    big = PackedHashes(bytes(2**18), 32)
    for number in range(1000):
        answer = client.lookup(str(number), 131072, big)
        client.discard(str(number))
        if answer == MISS_UNSENT:
            break
    assert answer == MISS_UNSENT
    assert client.counters.sent < 100  # two queues and the kernel's buffers, in 256 KiB messages


def test_discarded_lookups_leave_every_table_empty(connected, raw_server):
    client = connected()
    for number in range(1000):
        sender, request = ask(client, raw_server, str(number))
        client.discard(str(number))
        raw_server.reply(sender, request, hit_length=16)
    assert_nothing_open(client)
    raw_server.reply(*ask(client, raw_server))
    assert await_reply(client).status is Status.OK
    assert client.counters.late_dropped == 1000
    assert_nothing_open(client)


def test_discard_forgets_deferred_and_settled_questions(connected, raw_server, clock):
    client = connected(max_in_flight=1)
    ask(client, raw_server, "a")
    assert client.lookup("b", 64, HASHES) is None
    client.discard("b")
    clock.now_s += 1
    ask(client, raw_server, "c")  # settles "a"
    client.discard("a")
    client.discard("c")
    client.discard("unknown")
    assert_nothing_open(client)


def test_blocking_lookup_waits_for_a_server_and_its_answer(make_client, make_server):
    client = make_client()
    starter = threading.Thread(target=make_server)
    starter.start()
    assert client.lookup("a", 64, HASHES, blocking=True) == LookupReply(Status.OK, 16)
    starter.join()


def test_blocking_lookup_ignores_the_bound_on_others(connected, raw_server):
    client = connected(max_in_flight=1, timeout_s=60)
    first = ask(client, raw_server, "a")
    answering = threading.Thread(target=lambda: raw_server.reply(*raw_server.receive()))
    answering.start()
    assert client.lookup("b", 64, HASHES, blocking=True).status is Status.OK
    answering.join()
    raw_server.reply(*first, hit_length=16)
    assert await_reply(client, "a").hit_length == 16


@pytest.mark.parametrize("server", ["absent", "silent"])
def test_blocking_lookup_returns_by_its_deadline(make_client, request, server):
    client = make_client(timeout_s=0.1)
    if server == "silent":
        request.getfixturevalue("raw_server")
        assert client.lookup("a", 64, HASHES, blocking=True) == MISS_TIMED_OUT
    else:
        assert client.lookup("a", 64, HASHES, blocking=True) == MISS_UNSENT
    assert_nothing_open(client)


@pytest.mark.parametrize("act", ["ping", "reset", "key_spaces"])
def test_control_message_without_an_answer_is_false_and_forgotten(make_client, raw_server, act):
    client = make_client()
    acts = {
        "ping": lambda: client.ping(0.05),
        "reset": lambda: client.reset(0.05),
        "key_spaces": lambda: client.send_key_spaces(b"", 0.05),
    }
    assert acts[act]() is False
    assert_nothing_open(client)
    assert client.counters.timed_out + client.counters.unsent == 1


def test_reset_forgets_open_lookups(connected, raw_server):
    client = connected(max_in_flight=1)
    before = ask(client, raw_server, "a")
    assert client.lookup("b", 64, HASHES) is None

    def answer_reset():
        reset = raw_server.receive()
        raw_server.reply(*before, hit_length=64)  # what was stored before the reset
        raw_server.reply(*reset)

    answering = threading.Thread(target=answer_reset)
    answering.start()
    assert client.reset(60) is True
    answering.join()
    assert_nothing_open(client)
    raw_server.reply(*ask(client, raw_server, "a"), hit_length=0)
    assert await_reply(client, "a").hit_length == 0


def test_lookup_refuses_hashes_of_several_widths_and_forgets_the_question(connected):
    client = connected()
    with pytest.raises(ValueError, match="differ in width"):
        client.lookup("a", 64, [b"four", b"fives"])
    assert_nothing_open(client)


def test_lookup_refuses_a_length_beyond_the_protocol(connected):
    client = connected()
    with pytest.raises(ProtocolError, match="num_tokens"):
        client.lookup("a", -1, HASHES)
    assert_nothing_open(client)


def test_client_refuses_a_folder_that_others_can_enter(folder, endpoint):
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0755"):
        LookupClient(endpoint)


def test_closed_client_misses(connected, raw_server):
    client = connected()
    ask(client, raw_server)
    client.close()
    client.close()
    assert client.lookup("a", 64, HASHES) == MISS_UNSENT
    assert client.lookup("a", 64, HASHES, blocking=True) == MISS_UNSENT
    assert client.ping(60) is False
    assert client.reset(60) is False
    assert_nothing_open(client)


def test_client_closes_as_a_context_manager(endpoint):
    with LookupClient(endpoint) as client:
        pass
    assert client.lookup("a", 64, HASHES) == MISS_UNSENT
