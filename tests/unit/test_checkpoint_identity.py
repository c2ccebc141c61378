# SPDX-License-Identifier: Apache-2.0
import json
import os
import shutil

import pytest

from kvxfer.checkpoint_identity import checkpoint_fingerprint

TENSOR_BYTES = 25_000
NUM_TENSORS = 40


def write_safetensors(path, fill=lambda i: i):
    header, data = {}, b""
    for i in range(NUM_TENSORS):
        offsets = [len(data), len(data) + TENSOR_BYTES // NUM_TENSORS]
        header[f"t{i}"] = {
            "dtype": "U8",
            "shape": [offsets[1] - offsets[0]],
            "data_offsets": offsets,
        }
        data += bytes([fill(i)]) * (offsets[1] - offsets[0])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors")
    return folder


def test_copy_under_another_path_is_the_same_checkpoint(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "other")
    os.utime(copied / "model.safetensors", (1, 1))
    assert checkpoint_fingerprint(copied) == checkpoint_fingerprint(folder)


@pytest.mark.parametrize("changed", [0, 17, NUM_TENSORS - 1], ids="tensor={}".format)
def test_change_of_any_one_tensor_is_another_checkpoint(folder, changed):
    before = checkpoint_fingerprint(folder)
    write_safetensors(folder / "model.safetensors", lambda i: 99 if i == changed else i)
    assert checkpoint_fingerprint(folder) != before


def test_file_of_another_format_counts_by_its_time(tmp_path):
    weights = tmp_path / "model.bin"
    weights.write_bytes(b"x" * 100)
    before = checkpoint_fingerprint(tmp_path)
    os.utime(weights, (1, 1))
    assert checkpoint_fingerprint(tmp_path) != before


def test_folders_without_weights_are_told_apart_by_path(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        os.utime(tmp_path / name / "config.json", (1, 1))
    assert checkpoint_fingerprint(tmp_path / "a") != checkpoint_fingerprint(tmp_path / "b")


def test_malformed_safetensors_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file"):
        checkpoint_fingerprint(tmp_path)
