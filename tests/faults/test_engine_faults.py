# SPDX-License-Identifier: Apache-2.0
"""Real engines over a faulty store: every request is answered with the tokens of a cold engine."""

import time
import zlib

import pytest
from engine_checks import compute_again
from engine_families import FAMILIES, write_family
from engine_faults import ALL_FAULTS, TIMEOUTS, injected, mixed_rates
from engine_harness import EngineSettings
from engine_models import Prompts, loadable, write_tiny_llama
from faulty_store import Fault
from kill_rounds import kill_while_busy

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
NUM_MIXED_ROUNDS = 8
GOES_ON_WITHIN_S = 20.0
MOST_TRIES = 4
KINDS = {name: {name: 1.0} for name in ALL_FAULTS}
HYBRID_KINDS = [
    "exists.phantom",
    "get.late",
    "get.corrupt",
    "get.vanish",
    "get.short_answer",
    "get.raise",
    "put.lost",
    "put.corrupt",
]
"""Those that end in another way where failures are told by request and not by block."""


class Case:
    """Prompts, the outputs that they have cold, and an engine over a faulty store."""

    def __init__(self, engine, store, prompts, together):
        self.engine, self.store, self.prompts = engine, store, prompts
        self._together = together
        self.expected = self.compute()
        assert self.external_hits == 0
        store.settle()

    def compute(self):
        """Compute all prompts, with nothing in vLLM's own cache; return their outputs."""
        self.external_hits = 0
        outputs = []
        for batch in [self.prompts] if self._together else [[p] for p in self.prompts]:
            generation = compute_again(self.engine, batch)
            self.external_hits += generation.external_hits
            outputs += generation.outputs
        return outputs

    def check(self, name, rates):
        """Compute under faults, both what is stored and what has yet to be; outputs must stand.

        On a busy machine a lookup may be too late, and then no load is there to fail: once more.
        """
        for _ in range(MOST_TRIES):
            with injected(self.engine, rates) as counts:
                if name.startswith("put"):
                    self.engine.reset_store()
                assert self.compute() == self.expected
                self.store.settle()
            if counts[name]:
                break
        assert counts[name] > 0
        assert self.compute() == self.expected  # what was half saved, found damaged, forgotten


@pytest.fixture(scope="module")
def llama_settings(new_store, tmp_path_factory):
    model = write_tiny_llama(tmp_path_factory.mktemp("llama"))
    return EngineSettings(
        model=model,
        store=new_store().uri,
        connector="faulty_connector",
        extra=(("checksums", True), *TIMEOUTS),
    )


@pytest.fixture(scope="module")
def llama(engine_pool, llama_settings, new_store):
    store = new_store()
    engine = engine_pool.get(llama_settings.but(store=store.uri))
    draw = Prompts(1).draw
    prefix = draw(96)
    prompts = [prefix + draw(n) for n in (33, 64, 150)] + [draw(97), draw(300)]
    return Case(engine, store, prompts, together=True)


@pytest.fixture(scope="module")
def hybrid(engine_pool, llama_settings, new_store, tmp_path_factory):
    family = FAMILIES["recurrent_and_full"]
    store = new_store()
    model = write_family(tmp_path_factory.mktemp("hybrid"), family)
    engine = engine_pool.get(
        llama_settings.but(model=model, store=store.uri, besides=family.arguments)
    )
    draw = Prompts(2).draw
    prefix = draw(128)
    # One at a time: the recurrent kernels round by the shape of the whole batch.
    return Case(engine, store, [prefix + draw(70), prefix + draw(140)], together=False)


@pytest.mark.parametrize("name", KINDS)
def test_engine_answers_as_cold_under_each_fault(llama, name):
    llama.check(name, KINDS[name])


@pytest.mark.parametrize("name", HYBRID_KINDS)
def test_hybrid_engine_answers_as_cold_under_each_fault(hybrid, name):
    hybrid.check(name, KINDS[name])


@pytest.mark.parametrize("case", ["llama", "hybrid"])
def test_engine_answers_as_cold_under_a_mix_of_faults(request, case):
    case = request.getfixturevalue(case)
    hits = 0
    with injected(case.engine, mixed_rates(0.05), seed=3) as counts:
        for round_number in range(NUM_MIXED_ROUNDS):
            if round_number % 4 == 0:
                case.engine.reset_store()
            assert case.compute() == case.expected
            hits += case.external_hits
    assert hits > 0
    assert len(counts) >= 5, counts
    case.store.settle()
    assert case.compute() == case.expected


def test_loads_count_again_once_the_store_is_well(llama):
    """After all faults: what was damaged has been mended, and every prompt hits to its end."""
    for _ in range(2):  # the first one stores what is missing
        assert llama.compute() == llama.expected
        llama.store.settle()
    assert llama.compute() == llama.expected
    assert llama.external_hits == sum(loadable(len(prompt)) for prompt in llama.prompts)


# Policy fail, and no checksums


@pytest.fixture(scope="module")
def failing_store(new_store):
    return new_store()


@pytest.fixture(scope="module")
def failing_settings(llama_settings, failing_store):
    return llama_settings.but(store=failing_store.uri, failure_policy="fail", extra=TIMEOUTS)


@pytest.fixture(scope="module")
def failing(engine_pool, failing_settings, failing_store):
    draw = Prompts(4).draw
    engine = engine_pool.get(failing_settings)
    return Case(engine, failing_store, [draw(97), draw(200)], together=True)


def test_without_checksums_damage_changes_outputs(failing):
    """The control: the damage of these tests is of the kind that changes outputs."""
    with injected(failing.engine, {"get.corrupt": 1.0}) as counts:
        damaged = failing.compute()
    assert failing.external_hits == sum(loadable(len(prompt)) for prompt in failing.prompts)
    assert counts["get.corrupt"] > 0
    assert damaged != failing.expected
    assert failing.compute() == failing.expected


@pytest.mark.parametrize("fault", [Fault.FAILED, Fault.RAISE, Fault.LATE])
def test_policy_fail_ends_the_request_that_failed_and_no_other(failing, fault):
    fresh = Prompts(zlib.crc32(fault.encode())).draw(150)
    failing.engine.reset_local_cache()
    with injected(failing.engine, {f"get.{fault}": 1.0}):
        outputs = failing.engine.generate([*failing.prompts, fresh]).outputs
    assert [output.finish for output in outputs] == ["error", "error", "length"]
    assert [len(output.tokens) for output in outputs] == [0, 0, 8]
    deadline = time.monotonic() + GOES_ON_WITHIN_S
    while (again := failing.compute()) != failing.expected:  # late calls hold both load threads
        assert {output.finish for output in again} <= {"error", "length"}
        assert time.monotonic() < deadline


def test_engine_answers_right_after_another_was_killed_in_its_saves(
    engine_pool, failing_settings, failing
):
    """Under policy fail, so that a load of something half written would end its request."""
    failing.engine.reset_store()
    kill_while_busy(failing.engine, failing.prompts, delay_s=0.1)
    failing.engine = engine_pool.get(failing_settings)
    for _ in range(2):
        assert failing.compute() == failing.expected
        failing.store.settle()
    assert failing.external_hits == sum(loadable(len(prompt)) for prompt in failing.prompts)
