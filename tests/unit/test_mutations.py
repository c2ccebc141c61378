# SPDX-License-Identifier: Apache-2.0
"""The list of mutations fits the tree: ``make mutate`` can apply each, and misses no promise."""

from pathlib import Path

import pytest
from test_locks import load_script

ROOT = Path(__file__).resolve().parents[2]
mutations = load_script("mutations")


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda m: m.what.replace(" ", "_"))
def test_mutation_applies_to_its_file_and_names_tests_that_exist(mutation):
    text = (ROOT / mutation.file).read_text()
    assert mutation.applied_to(text) != text
    assert all((ROOT / test).exists() for test in mutation.tests)


def test_every_promise_of_the_architecture_has_mutations():
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Promises")[2]
    numbers = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("|")]
    promises = {int(number) for number in numbers if number.isdigit()}
    assert promises == set(range(1, 11))
    assert {mutation.promise for mutation in mutations.MUTATIONS} == promises


def test_mutation_whose_text_has_gone_says_so():
    mutation = mutations.Mutation(1, "what", "file", "old", "new", ())
    with pytest.raises(ValueError, match="file has 0 times 'old', not once"):
        mutation.applied_to("nothing of the kind")
    with pytest.raises(ValueError, match="file has 2 times"):
        mutation.applied_to("old old")
