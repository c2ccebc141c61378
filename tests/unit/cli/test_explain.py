# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from typer.testing import CliRunner

from kvxfer.cli import explain
from kvxfer.cli.app import app
from kvxfer.cli.model_client import ModelProcessError
from kvxfer.errors import ConfigError

ANSWER = {
    "store": "lmdb:///kv",
    "store_trouble": None,
    "model": "llama",
    "digest": "d" * 32,
    "num_tokens": 100,
    "hit_tokens": 32,
    "cut": "missing",
    "line": "hit 32 of 100 tokens: group 1 lacks the chunk that ends at token 48; "
    "group 0 (full) stored to 96, offered 96; group 1 (sliding_window) stored to 32, offered 32",
    "groups": [
        {
            "group": 0,
            "kind": "full",
            "block_tokens": 16,
            "eagle_tokens": 0,
            "stored": [True] * 6,
            "needed": [True] * 2,
        },
        {
            "group": 1,
            "kind": "sliding_window",
            "block_tokens": 16,
            "eagle_tokens": 0,
            "stored": [True, True, False, False, False, False],
            "needed": [False, True],
        },
    ],
}


@pytest.fixture
def asked(monkeypatch):
    """Return the list of questions; each is answered with ``ANSWER``."""
    questions = []
    monkeypatch.setattr(explain, "ask", lambda question: questions.append(question) or ANSWER)
    return questions


@pytest.fixture
def ids(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text("[1, 2, 3]")
    return path


def run(tmp_path, *arguments):
    return CliRunner().invoke(
        app, ["explain", "--model", str(tmp_path), *arguments], env={"COLUMNS": "120"}
    )


def rows(group):
    return [row.plain for row in explain.picture(group)]


def test_picture_tells_what_a_hit_loads_from_what_is_stored():
    assert rows(ANSWER["groups"][0]) == [" 0 ██▒▒▒▒"]
    assert rows(ANSWER["groups"][1]) == [" 0 ▒█····"]


def test_picture_breaks_into_rows_that_begin_with_their_token():
    group = {"block_tokens": 16, "stored": [True] * 65, "needed": [True] * 65}
    assert rows(group) == ["   0 " + "█" * 64, "1024 █"]


def test_picture_of_a_long_prompt_has_cells_of_several_blocks():
    stored = [True] * 2049 + [False] * 1000
    group = {"block_tokens": 16, "stored": stored, "needed": [True] * 2049}
    found = rows(group)
    assert len(found) <= explain.MOST_ROWS
    cells = "".join(row.partition(" ")[2].strip() for row in (r.strip() for r in found))
    assert cells.strip("█").startswith("·") or "▞" in cells
    assert cells.count("█") == 2049 // 3


def test_picture_of_no_block_is_empty():
    assert rows({"block_tokens": 16, "stored": [], "needed": []}) == []


def test_explain_says_sentence_and_groups(asked, tmp_path, ids):
    result = run(tmp_path, "--token-ids", str(ids))
    assert result.exit_code == 0, result.output
    assert "hit 32 of 100 tokens: group 1 lacks the chunk that ends at token 48" in result.stdout
    assert "group 1 (sliding_window) stored to 32, offered 32, blocks of 16" in result.stdout
    assert asked[0]["token_ids"] == [1, 2, 3]
    assert asked[0]["arguments"]["model"] == str(tmp_path.resolve())


def test_explain_says_what_a_group_gives_back(monkeypatch, tmp_path, ids):
    groups = [{**ANSWER["groups"][0], "eagle_tokens": 16}, ANSWER["groups"][1]]
    monkeypatch.setattr(explain, "ask", lambda question: {**ANSWER, "groups": groups})
    lines = run(tmp_path, "--token-ids", str(ids)).stdout.splitlines()
    eagle = [line for line in lines if "EAGLE" in line]
    assert eagle == [
        "group 0 (full) stored to 96, offered 96, blocks of 16 tokens, gives 16 back for EAGLE"
    ]


def test_explain_passes_text_on(asked, tmp_path):
    assert run(tmp_path, "--prompt", "hello").exit_code == 0
    assert (asked[0]["text"], asked[0]["token_ids"]) == ("hello", None)


def test_explain_prints_json(asked, tmp_path, ids):
    assert json.loads(run(tmp_path, "--token-ids", str(ids), "--json").stdout) == ANSWER


def test_explain_shows_why_no_store_could_be_read(monkeypatch, tmp_path, ids):
    answer = {**ANSWER, "store_trouble": "there is no store"}
    monkeypatch.setattr(explain, "ask", lambda question: answer)
    assert "there is no store" in run(tmp_path, "--token-ids", str(ids)).stdout


def test_explain_of_a_prompt_that_is_too_short_has_groups_without_a_report(monkeypatch, tmp_path):
    line = "hit 0 of 3 tokens: too short to match (a hit ends on a multiple of 16)"
    answer = {
        **ANSWER,
        "line": line,
        "groups": [{**ANSWER["groups"][0], "stored": [], "needed": []}],
    }
    monkeypatch.setattr(explain, "ask", lambda question: answer)
    result = run(tmp_path, "--prompt", "x")
    assert line in result.stdout
    assert "group 0 (full), blocks of 16 tokens" in result.stdout


def test_a_refusal_is_a_sentence_and_exit_code_1(monkeypatch, tmp_path, ids):
    refusal = {"error": "sleep mode frees memory", "kind": "UnsupportedError"}
    monkeypatch.setattr(explain, "ask", lambda question: refusal)
    result = run(tmp_path, "--token-ids", str(ids))
    assert result.exit_code == 1
    assert "FAILED: UnsupportedError: sleep mode frees memory" in result.stderr


def test_a_crash_is_a_sentence_and_exit_code_1(monkeypatch, tmp_path, ids):
    def crash(question):
        raise ModelProcessError("ended with -11")

    monkeypatch.setattr(explain, "ask", crash)
    result = run(tmp_path, "--token-ids", str(ids))
    assert (result.exit_code, "ended with -11" in result.stderr) == (1, True)


@pytest.mark.parametrize("arguments", [[], ["--prompt", "a", "--token-ids", "IDS"]])
def test_explain_wants_one_prompt(asked, tmp_path, ids, arguments):
    words = [str(ids) if word == "IDS" else word for word in arguments]
    assert run(tmp_path, *words).exit_code == 2
    assert asked == []


def test_explain_wants_a_model(asked):
    assert CliRunner().invoke(app, ["explain", "--prompt", "a"]).exit_code == 2


@pytest.mark.parametrize("text", ["1 2 3", "[1,2,3]", "1, 2\n3\n"])
def test_token_ids_may_be_written_in_any_way(tmp_path, text):
    path = tmp_path / "ids"
    path.write_text(text)
    assert explain.read_token_ids(path) == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "[]", "one", "1.5", "-1"])
def test_what_is_no_token_id_is_refused(tmp_path, text):
    path = tmp_path / "ids"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--token-ids"):
        explain.read_token_ids(path)
