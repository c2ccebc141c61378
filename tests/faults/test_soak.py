# SPDX-License-Identifier: Apache-2.0
"""What the soak calls a wrong answer; it runs by itself, for minutes, as ``make soak``."""

import dataclasses

import pytest
from engine_harness import Output
from soak import LOGPROB_TOLERANCE, Tally, compare, report

NEAR = LOGPROB_TOLERANCE / 2
FAR = LOGPROB_TOLERANCE * 2
EXPECTED = Output([5, 6], [[[5, -1.0], [7, -1.0 - NEAR]], [[6, -2.0], [9, -2.0 - FAR]]])


def answer(tokens, *, shift=0.0):
    """Return the expected output with other tokens, its logprobs shifted."""
    logprobs = [[[t, p + shift] for t, p in place] for place in EXPECTED.logprobs]
    return dataclasses.replace(EXPECTED, tokens=tokens, logprobs=logprobs[: len(tokens)])


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (EXPECTED, "right"),
        (answer([5, 6], shift=NEAR), "right"),
        (answer([7, 1]), "tied"),
        (answer([5, 9]), "wrong"),
        (answer([5, 8]), "wrong"),
        (answer([5, 6], shift=FAR), "wrong"),
        (answer([5]), "wrong"),
        (answer([]), "wrong"),
        (dataclasses.replace(EXPECTED, finish="error"), "wrong"),
    ],
    ids=["same", "near", "tied", "token", "unlikely", "logprob", "short", "empty", "error"],
)
def test_soak_compares_tokens_and_logprobs(found, verdict):
    assert compare(EXPECTED, found)[0] == verdict


@pytest.mark.parametrize("problem", ["wrong", "stuck"])
def test_soak_fails_for_one_wrong_or_missing_answer(problem, capsys):
    tallies = {"full_attention": Tally()}
    assert report(tallies)
    tallies["full_attention"].counts[problem] += 1
    assert not report(tallies)
    assert f"{problem} 1" in capsys.readouterr().out


def test_soak_fails_for_an_engine_that_died(capsys):
    assert not report({"hybrid": Tally(errors=["no reply"])})
    assert "error: no reply" in capsys.readouterr().out
