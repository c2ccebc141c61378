# SPDX-License-Identifier: Apache-2.0
"""The parts of the process that need no vLLM; the rest is run by the engine tests."""

import pytest

from kvxfer.cli import model_process
from kvxfer.cli.model_process import StoredKeys


@pytest.mark.parametrize(("checksums", "expected"), [(False, [1, 1, 0]), (True, [1, 0, 0])])
def test_a_key_counts_with_its_checksum_where_engines_want_one(checksums, expected):
    stored = StoredKeys({b"a", b"a#", b"b", b"c#"}, checksums=checksums)
    assert list(stored.exists([b"a", b"b", b"c"])) == expected


def test_what_a_broken_package_raises_is_an_answer():
    def broken():
        raise OSError("libcuda.so.1: cannot open shared object file")

    assert model_process._attempt(broken) == {
        "error": "libcuda.so.1: cannot open shared object file",
        "kind": "OSError",
    }


def test_text_is_cut_by_the_models_own_tokenizer(monkeypatch):
    transformers = pytest.importorskip("transformers")
    names = []

    def load(name):
        names.append(name)
        return lambda text: {"input_ids": [len(word) for word in text.split()]}

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    assert model_process._tokens({"model": "m"}, "a bb ccc") == [1, 2, 3]
    assert model_process._tokens({"model": "m", "tokenizer": "t"}, "a") == [1]
    assert names == ["m", "t"]
