# SPDX-License-Identifier: Apache-2.0
import dataclasses
import io

import pytest
from rich.console import Console

from kvxfer.cli.comparison import Comparison
from kvxfer.cli.engine_client import EngineReport, Moved, PromptResult

NOTHING = Moved(0, 0, 0.0)
COLD = EngineReport(
    [PromptResult([5, 6], [-0.5, -1.0], 2.0, 0), PromptResult([7, 8], [-0.25, -2.0], 1.0, 0)],
    saved=Moved(6, 6_000_000, 0.002),
    loaded=NOTHING,
)


def warm_report(tokens=(5, 6), hits=64, logprobs=(-0.5, -1.0)):
    return EngineReport(
        [
            PromptResult(list(tokens), list(logprobs), 0.1, hits),
            PromptResult([7, 8], [-0.25, -2.0], 0.3, hits),
        ],
        saved=NOTHING,
        loaded=Moved(4, 4_000_000, 0.001),
    )


def test_equal_outputs_with_hits_are_no_failure():
    comparison = Comparison(100, COLD, warm_report())
    assert comparison.failures() == []
    assert comparison.outputs_identical
    assert comparison.hit_tokens == 128


@pytest.mark.parametrize(
    ("tokens", "place"),
    [((5, 9), 2), ((4, 6), 1), ((5,), 2), ((5, 6, 7), 3)],
    ids=["last", "first", "short", "long"],
)
def test_a_token_that_differs_is_a_failure_that_names_it(tokens, place):
    comparison = Comparison(100, COLD, warm_report(tokens, logprobs=[-0.5] * len(tokens)))
    assert comparison.failures() == [f"outputs differ: prompt 1, output token {place}"]
    assert not comparison.outputs_identical


def test_no_hit_is_a_failure_although_outputs_are_equal():
    (reason,) = Comparison(100, COLD, warm_report(hits=0)).failures()
    assert reason.startswith("nothing hit: engine A saved 6 values")


def test_hits_of_the_cold_run_are_a_failure():
    (reason,) = Comparison(100, warm_report(), warm_report()).failures()
    assert reason.startswith("engine A found 128 tokens in the store")


def test_table_shows_what_was_measured():
    text = rendered(Comparison(100, COLD, warm_report(logprobs=(-0.5, -1.5))))
    for row in [
        ("prompt tokens", "200"),
        ("external hit tokens", "128"),
        ("time to first token, cold (median)", "1,500 ms"),
        ("time to first token, warm (median)", "200 ms"),
        ("saved", "6 values, 6.0 MB, 3.00 GB/s"),
        ("loaded", "4 values, 4.0 MB, 4.00 GB/s"),
        ("largest logprob difference", "5.0e-01"),
        ("outputs identical", "yes"),
    ]:
        assert any(all(cell in line for cell in row) for line in text.splitlines()), row


def test_table_says_that_outputs_differ():
    text = rendered(Comparison(100, COLD, warm_report(tokens=(5, 9))))
    assert any("outputs identical" in line and "NO" in line for line in text.splitlines())


def test_table_of_outputs_of_unequal_length_is_shown():
    text = rendered(Comparison(100, COLD, warm_report(tokens=(5,), logprobs=(-0.5,))))
    assert "outputs identical" in text


def rendered(comparison):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(comparison.table())
    return console.export_text()


def again_report(*results):
    return dataclasses.replace(COLD, again=list(results))


HIT = PromptResult([5, 9], [-0.5, -1.0], 0.2, 0, 64)
OTHER = PromptResult([7, 8], [-0.25, -2.0], 0.2, 0, 64)


def test_hit_of_vllms_own_cache_is_the_reference():
    comparison = Comparison(100, again_report(HIT, OTHER), warm_report(tokens=(5, 9)))
    assert comparison.failures() == []  # although the cold run has [5, 6]
    assert "vLLM's own cache" in rendered(comparison)
    comparison = Comparison(100, again_report(HIT, OTHER), warm_report(tokens=(5, 6)))
    assert comparison.failures() == ["outputs differ: prompt 1, output token 2"]


@pytest.mark.parametrize(
    "again",
    [dataclasses.replace(HIT, local_hit_tokens=32), dataclasses.replace(HIT, hit_tokens=32)],
    ids=["another_length", "of_the_store"],
)
def test_a_hit_of_another_kind_is_no_reference(again):
    comparison = Comparison(100, again_report(again, OTHER), warm_report(tokens=(5, 6)))
    assert comparison.failures() == []
    assert "vLLM's own cache (1 with the cold run)" in rendered(comparison)


@pytest.mark.parametrize("rounds", [False, True])
def test_rounding_is_named_where_it_may_be_the_reason(rounds):
    comparison = Comparison(100, COLD, warm_report(tokens=(5, 9)), rounds=rounds)
    reasons = comparison.failures()
    assert ["2 prompt(s) could be compared with a cold run" in r for r in reasons[1:]] == (
        [True] if rounds else []
    )
    local = Comparison(100, again_report(HIT, OTHER), warm_report(tokens=(5, 6)), rounds=rounds)
    assert len(local.failures()) == 1


def test_table_says_that_only_cold_runs_could_be_compared():
    results = [dataclasses.replace(each, local_hit_tokens=0) for each in (HIT, OTHER)]
    text = rendered(Comparison(100, again_report(*results), warm_report()))
    assert any("compared with" in line and "the cold run" in line for line in text.splitlines())
