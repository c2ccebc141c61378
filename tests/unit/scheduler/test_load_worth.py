# SPDX-License-Identifier: Apache-2.0
"""When a hit is loaded and when it is computed."""

import pytest

from kvxfer.scheduler.load_worth import HALF_LIFE_S, PROBE_S, LoadWorth


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def measuring(clock, **options):
    return LoadWorth(measures=True, clock=clock, **options)


def prefill(worth, clock, tokens, seconds):
    worth.note_step(tokens)
    clock.now += seconds
    worth.note_step(0)


def test_everything_pays_unless_told_otherwise(clock):
    worth = LoadWorth(clock=clock)
    prefill(worth, clock, 1000, 0.001)
    worth.note_load(10, 5.0)
    assert worth.pays(1)


def test_fewer_tokens_than_the_floor_are_not_loaded(clock):
    worth = LoadWorth(min_tokens=256, clock=clock)
    assert not worth.pays(255)
    assert worth.pays(256)


def test_loads_pay_until_both_rates_are_known(clock):
    worth = measuring(clock)
    assert worth.pays(100)
    worth.note_load(100, 10.0)
    assert worth.pays(100)
    prefill(worth, clock, 1000, 1.0)
    assert not worth.pays(100)


def test_loads_pay_where_they_are_faster_than_prefills(clock):
    worth = measuring(clock)
    prefill(worth, clock, 1000, 1.0)
    worth.note_load(3000, 1.0)
    assert worth.pays(100)
    assert worth.load_tokens_per_s == 3000
    assert worth.prefill_tokens_per_s == 1000


def test_one_load_is_tried_again_after_a_while(clock):
    worth = measuring(clock, load_tokens_per_s=10, prefill_tokens_per_s=20)
    assert not worth.pays(100)
    clock.now += PROBE_S
    assert worth.pays(100)
    assert not worth.pays(100)


def test_old_measurements_fade(clock):
    worth = measuring(clock)
    worth.note_load(1000, 1.0)
    clock.now += HALF_LIFE_S
    worth.note_load(1000, 4.0)
    assert worth.load_tokens_per_s == pytest.approx(1500 / 4.5)


def test_time_between_steps_without_prefill_and_idle_time_are_no_prefill(clock):
    worth = measuring(clock)
    worth.note_step(0)
    clock.now += 5
    worth.note_step(500)
    clock.now += 1
    worth.note_step(300)
    worth.note_idle()
    clock.now += 60
    worth.note_step(0)
    assert worth.prefill_tokens_per_s == 500


def test_given_rates_are_not_measured(clock):
    worth = measuring(clock, load_tokens_per_s=50, prefill_tokens_per_s=40)
    worth.note_load(1, 100.0)
    prefill(worth, clock, 10**6, 0.1)
    assert worth.pays(100)
