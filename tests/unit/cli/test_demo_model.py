# SPDX-License-Identifier: Apache-2.0
"""What the demo reads of a model, with answers made up in the place of vLLM's."""

import json
import sys

import pytest

import kvxfer.cli.demo_model as demo_model
from kvxfer.cli.demo_model import OUTPUT_TOKENS, DemoModel, find_model, read_model
from kvxfer.errors import ConfigError


def group(block_tokens=32, value_bytes=(1000,), cacheable=True, kind="full"):
    return {
        "block_tokens": block_tokens,
        "value_bytes": list(value_bytes),
        "cacheable": cacheable,
        "kind": kind,
    }


@pytest.fixture
def vllm(monkeypatch):
    """Return what vLLM answers, and the list of the questions that it was asked."""
    answer, questions = {"align_tokens": 32, "groups": [group()]}, []

    def ask(question, environ):
        questions.append(question)
        assert environ["HF_HUB_OFFLINE"] == "1"
        return answer

    monkeypatch.setattr(demo_model, "ask", ask)
    return answer, questions


def write(folder, **config):
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300, **config}))
    return folder


def model(longest=4096, hit_tokens=32, groups=((32, 1000),)):
    return DemoModel(
        folder="folder",
        dtype="auto",
        vocab_size=300,
        longest=longest,
        hit_tokens=hit_tokens,
        groups=groups,
    )


def test_model_is_what_vllm_and_its_configuration_say(vllm, tmp_path):
    vllm[0]["align_tokens"] = 64
    vllm[0]["groups"] = [group(32, [1000, 2000]), group(64, [500]), group(8, [9], cacheable=False)]
    found = read_model(write(tmp_path, max_position_embeddings=512), "auto")
    assert (found.vocab_size, found.longest, found.hit_tokens) == (300, 512, 64)
    assert list(found.groups) == [(32, 3000), (64, 500)]
    assert found.chunk_bytes == 3000
    assert found.stored_bytes(100) == (3 + 1) * 3000 + (1 + 1) * 500
    (question,) = vllm[1]
    assert question["arguments"]["model"] == str(tmp_path)
    assert question["arguments"]["dtype"] == "auto"
    assert question["arguments"]["max_model_len"] == 512
    assert question["arguments"]["skip_tokenizer_init"]


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"text_config": {"vocab_size": 300, "n_positions": 77}}, 64),
        ({"text_config": None, "seq_length": 100}, 96),
        ({"max_position_embeddings": 512, "model_max_length": 256}, 256),
        ({"max_position_embeddings": None}, None),
        ({}, None),
    ],
    ids=["nested", "not_nested", "least_of_two", "null", "none"],
)
def test_longest_sequence_is_read_whatever_its_name(vllm, tmp_path, config, longest):
    assert read_model(write(tmp_path, **config), "auto").longest == longest


@pytest.mark.parametrize(
    ("longest", "hit_tokens", "expected"),
    [
        (None, 32, 1500),
        (131_072, 32, 1500),
        (512, 32, 512 - OUTPUT_TOKENS),
        (131_072, 1056, 2113),
        (2000, 1056, 2000 - OUTPUT_TOKENS),
        (49, 32, 33),
    ],
)
def test_prompts_are_as_long_as_suits_the_model(longest, hit_tokens, expected):
    found = model(longest, hit_tokens)
    assert found.prompt_tokens(None) == expected
    assert found.prompt_tokens(expected) == expected


@pytest.mark.parametrize(
    ("longest", "asked", "words"),
    [
        (48, None, "nothing could be loaded"),
        (4096, 32, "is too short, give 33 or more"),
        (512, 497, "is too long, 496 leave room for 16"),
    ],
)
def test_prompts_that_cannot_hit_or_do_not_fit_are_refused(longest, asked, words):
    with pytest.raises(ConfigError, match=words):
        model(longest).prompt_tokens(asked)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "config.json cannot be read"),
        ("{", "config.json cannot be read"),
        ("[]", "config.json cannot be read"),
        ('{"text_config": 7}', "config.json cannot be read"),
        ("{}", "config.json has no vocab_size"),
        ('{"vocab_size": "many"}', "config.json has no vocab_size"),
    ],
)
def test_a_folder_without_configuration_is_refused_before_vllm_is_asked(
    vllm, tmp_path, text, words
):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_model(tmp_path, "auto")
    assert vllm[1] == []


PYDANTIC = (
    "1 validation error for ModelConfig\n  Value error, model type `foo` is not known.\n\nYou can "
    "update it [type=value_error, input_value=...]\n    For further information visit"
)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (PYDANTIC, "ValidationError", "ValidationError: model type `foo` is not known.$"),
        ("No module named 'vllm'", "ModuleNotFoundError", "No module named 'vllm'$"),
        ("sleep mode is\n on", "UnsupportedError", "UnsupportedError: sleep mode is on$"),
    ],
)
def test_a_model_that_vllm_refuses_is_named_with_the_reason(vllm, tmp_path, error, kind, words):
    vllm[0].update(error=error, kind=kind)
    folder = write(tmp_path, architectures=["FooForCausalLM"])
    with pytest.raises(ConfigError, match=rf"does not serve .*\(FooForCausalLM\).*{words}"):
        read_model(folder, "auto")


@pytest.mark.parametrize(
    ("groups", "kinds"),
    [([], "none"), ([group(cacheable=False, kind="cross")], "cross")],
)
def test_a_model_that_caches_nothing_by_prefix_is_refused(vllm, tmp_path, groups, kinds):
    vllm[0]["groups"] = groups
    with pytest.raises(ConfigError, match=rf"caches nothing of .* \(cache groups: {kinds}\)"):
        read_model(write(tmp_path), "auto")


def test_model_is_found_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert find_model("here") == tmp_path.resolve() / "here"


@pytest.mark.parametrize("name", ["./nothing", "~/nothing", "/nothing/here"])
def test_a_folder_that_is_not_there_is_no_name(name):
    with pytest.raises(ConfigError, match="is no folder; --model takes one"):
        find_model(name)


def test_a_file_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is no folder"):
        find_model("file")


def test_model_is_found_by_name_in_the_hubs_cache(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    original = hub.snapshot_download
    monkeypatch.setattr(
        hub,
        "snapshot_download",
        lambda name, **options: original(name, cache_dir=tmp_path, **options),
    )
    assert find_model("org/name") == snapshot
    with pytest.raises(ConfigError, match="hf download org/other"):
        find_model("org/other")


def test_a_name_cannot_be_found_where_the_hubs_client_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="hf download org/name"):
        find_model("org/name")
