# SPDX-License-Identifier: Apache-2.0
"""The lookup channel beside the in-tree connector's, servers in processes of their own.

``bench_whole_way`` has each side's own lookup behind its server, on a stub store: from the
scheduler's question to its answer. Elsewhere the servers give one stub answer, so that the channel
alone is measured: ``bench_round_trip`` from question to answer; ``bench_ask`` what the scheduler's
step pays for asking without waiting, beside the floor that nobody can avoid, joining the hashes;
``bench_poll`` what each later step pays while there is no answer.
"""

import os
import signal

import pytest
from config import SIZES
from lookup_channels import CHANNELS, FIXED, FIXED_HIT_LENGTH, open_channel, random_hashes
from lookup_sides import expected_hit

PROMPTS = sorted({1_024, SIZES.prompt_tokens})

# The in-tree pair leaves its contexts to the garbage collector, which warns whoever runs then.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", params=CHANNELS, ids="impl={}".format)
def impl(request):
    return request.param


@pytest.fixture(scope="module")
def channel(impl):
    """A client of the implementation and its server, warmed up by one lookup."""
    with open_channel(impl, FIXED) as client:
        assert client.look_up("warm-up", 1_024, random_hashes(1_024)) == FIXED_HIT_LENGTH
        yield client


@pytest.mark.benchmark(group="lookup.whole_way", min_rounds=SIZES.min_rounds)
@pytest.mark.parametrize("case", ["cold", "full_hit"], ids="case={}".format)
def bench_whole_way(benchmark, impl, case):
    num_tokens = SIZES.prompt_tokens
    hashes = random_hashes(num_tokens)
    with open_channel(impl, case) as client:
        hit_length = benchmark(client.look_up, "request", num_tokens, hashes)
        assert hit_length == expected_hit(num_tokens, case)


@pytest.mark.benchmark(group="lookup.round_trip", min_rounds=SIZES.min_rounds)
@pytest.mark.parametrize("num_tokens", PROMPTS, ids="tokens={}".format)
def bench_round_trip(benchmark, channel, impl, num_tokens):
    hashes = random_hashes(num_tokens)
    benchmark.extra_info.update(bytes_moved=len(hashes) * SIZES.hash_bytes)
    assert benchmark(channel.look_up, "request", num_tokens, hashes) == FIXED_HIT_LENGTH


@pytest.mark.benchmark(group="lookup.ask")
@pytest.mark.parametrize("num_tokens", PROMPTS, ids="tokens={}".format)
def bench_ask(benchmark, channel, impl, num_tokens):
    hashes = random_hashes(num_tokens)

    def settle():
        assert channel.look_up("asked", num_tokens, hashes) == FIXED_HIT_LENGTH

    asked = benchmark.pedantic(
        channel.ask,
        args=("asked", num_tokens, hashes),
        setup=settle,
        rounds=SIZES.min_rounds * 20,
    )
    assert asked is None
    settle()


@pytest.mark.benchmark(group="lookup.ask")
@pytest.mark.parametrize("num_tokens", PROMPTS, ids="tokens={}".format)
def bench_ask_floor(benchmark, num_tokens):
    hashes = random_hashes(num_tokens)
    assert len(benchmark(b"".join, hashes)) == len(hashes) * SIZES.hash_bytes


@pytest.mark.benchmark(group="lookup.poll")
def bench_poll(benchmark, channel, impl):
    hashes = random_hashes(1_024)
    os.kill(channel.server_pid, signal.SIGSTOP)
    os.waitpid(channel.server_pid, os.WUNTRACED)  # until it has stopped
    try:
        assert channel.ask("polled", 1_024, hashes) is None
        assert benchmark(channel.ask, "polled", 1_024, hashes) is None
    finally:
        os.kill(channel.server_pid, signal.SIGCONT)
        channel.look_up("polled", 1_024, hashes)
