# SPDX-License-Identifier: Apache-2.0
"""The fuzz target, and a short run of it where atheris is; ``make fuzz-frames`` runs longer."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import fuzz_frames
import pytest

TARGET = Path(fuzz_frames.__file__)
SECONDS = 5


def test_every_kind_of_good_message_is_read():
    decoded = {type(read(seed)) for seed in fuzz_frames.seeds()}
    assert {kind.__name__ for kind in decoded} == {
        "LookupRequest",
        "ResetRequest",
        "PingRequest",
        "KeySpacesRequest",
        "Reply",
        "KeySpacesPayload",
    }


def read(data):
    first_end = 3 + int.from_bytes(data[1:3], "little")
    frames = [data[3:first_end]] + ([data[first_end:]] if len(data) > first_end else [])
    if data[0] == 0:
        return fuzz_frames.protocol.decode_request(frames)
    if data[0] == 1:
        return fuzz_frames.protocol.decode_reply(frames)
    return fuzz_frames.KeySpacesPayload.decode(frames[0])


def test_good_messages_cut_short_or_with_a_byte_changed_pass_the_target():
    for seed in fuzz_frames.seeds():
        for end in range(len(seed) + 1):
            fuzz_frames.check(seed[:end])
        for at in range(len(seed)):
            for mask in (1, 0x80, 0xFF):
                fuzz_frames.check(seed[:at] + bytes([seed[at] ^ mask]) + seed[at + 1 :])


def fuzz(folder, **environ):
    """Run the fuzzer in a child, in ``folder``; return its status and what it said."""
    child = subprocess.run(
        [sys.executable, TARGET, folder / "corpus", f"-max_total_time={SECONDS}", "-seed=1"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ},
        capture_output=True,
        text=True,
        timeout=SECONDS + 60,
        check=False,
    )
    return child.returncode, child.stdout + child.stderr


needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is an optional tool (wheels for x86-64 only): pip install atheris",
)


@needs_atheris
def test_a_short_run_of_the_fuzzer_finds_nothing(tmp_path):
    status, said = fuzz(tmp_path)
    assert status == 0, said[-3000:]
    assert "DONE" in said or "Done" in said
    assert not list(tmp_path.glob("crash-*"))


@needs_atheris
def test_a_planted_fault_is_found(tmp_path):
    """The control: a message that is not among the seeds raises."""
    status, said = fuzz(tmp_path, KVXFER_FUZZ_PLANT="1")
    assert status != 0
    assert "the planted fault" in said
    assert list(tmp_path.glob("crash-*"))
