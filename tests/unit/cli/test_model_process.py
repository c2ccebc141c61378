# SPDX-License-Identifier: Apache-2.0
"""The parts of the process that need no vLLM; the rest is run by the engine tests."""

import sys
from types import SimpleNamespace

import pytest

from kvxfer.cli import model_process
from kvxfer.cli.model_process import StoredKeys
from kvxfer.keys import KeySpace


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


def rank(*held):
    """Return a rank that holds (group, prefix) pairs, and layers named as their prefixes."""
    sets = [SimpleNamespace(group=group, layers=(f"layer {p.decode()}",)) for group, p in held]
    return SimpleNamespace(held=held, facts=SimpleNamespace(layer_sets=sets))


@pytest.fixture
def engine(monkeypatch):
    """Return an engine of two stages with two ranks each, which hold the same of group 1."""

    class RankSpaces:
        def __init__(self, cache_prefix, facts, names, layout):
            assert cache_prefix == "team"
            self.held = {}
            for group, prefix in names:
                self.held.setdefault(group, []).append(KeySpace(group, prefix, 0, len(prefix)))

    monkeypatch.setitem(sys.modules, "kvxfer.spaces", SimpleNamespace(RankSpaces=RankSpaces))
    ranks = [
        rank((0, b"p0/h0"), (1, b"p0/all")),
        rank((0, b"p0/h1"), (1, b"p0/all")),
        rank((0, b"p1/h0"), (1, b"p1/all")),
        rank((0, b"p1/h1"), (1, b"p1/all")),
    ]
    for each in ranks:
        each.names, each.layout = each.held, None
    return SimpleNamespace(config=SimpleNamespace(cache_prefix="team"), ranks=ranks)


def test_a_chunk_has_the_shards_of_all_ranks_each_once(engine):
    spaces = model_process._key_spaces(engine)
    prefixes = {group: [space.prefix for space in found] for group, found in spaces.items()}
    assert prefixes == {
        0: [b"p0/h0", b"p0/h1", b"p1/h0", b"p1/h1"],
        1: [b"p0/all", b"p1/all"],
    }
    assert [space.value_bytes for space in spaces[1]] == [6, 6]


def test_a_group_has_the_layers_of_all_stages_each_once(engine):
    assert model_process._layers(engine, 1) == ["layer p0/all", "layer p1/all"]
