# SPDX-License-Identifier: Apache-2.0
"""Endpoints are private, distinct by engine, short enough, and never taken from a live server."""

import os
import signal
import socket
import stat
import time
from pathlib import Path

import pytest

from kvxfer.errors import ConfigError
from kvxfer.lookup import Endpoint
from kvxfer.lookup.endpoint import MAX_PATH_BYTES, _locked


@pytest.fixture
def surroundings(folder, monkeypatch):
    """An environment without a runtime folder and with ``folder`` for temporary files."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def listen(endpoint, closing):
    listener = endpoint.listen()
    closing(listener.listening)
    return listener


def test_lock_of_the_folder_does_not_live_on_in_a_forked_child(folder):
    with _locked(folder) as inside:
        assert inside
        if not (child := os.fork()):
            time.sleep(60)
            os._exit(0)
    try:
        with _locked(folder) as inside:
            assert inside
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_endpoint_is_the_same_for_both_sides(folder):
    assert Endpoint.for_engine("a", 3, folder) == Endpoint.for_engine("a", 3, str(folder))


def test_endpoint_differs_by_engine_and_by_rank(folder):
    workers = [("a", 0, 0), ("a", 1, 0), ("a", 0, 1), ("b", 0, 0), ("a_dp1", 0, 0), ("", 0, 0)]
    paths = {Endpoint.for_engine(name, dp, folder, rank=rank).path for name, dp, rank in workers}
    assert len(paths) == len(workers)


@pytest.mark.parametrize(
    "engine_id", ["x" * 5000, "../../etc/passwd", "a/b c\0d", "ключ", "\ud800"]
)
def test_endpoint_takes_any_engine_id(folder, engine_id, closing):
    endpoint = Endpoint.for_engine(engine_id, folder=folder)
    assert endpoint.path.parent == folder
    listen(endpoint, closing).remove_file()


def test_endpoint_prefers_the_runtime_folder(surroundings, monkeypatch):
    runtime = surroundings / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert Endpoint.for_engine("a").path.parent == runtime / "kvxfer"


@pytest.mark.parametrize("runtime", ["", "relative", "/no/such/folder", "x" * 90])
def test_endpoint_falls_back_to_the_temporary_folder(surroundings, monkeypatch, runtime):
    if len(runtime) > 80:  # it exists, but no socket path fits below it
        runtime = surroundings / runtime
        runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert Endpoint.for_engine("a").path.parent == surroundings / f"kvxfer-{os.geteuid()}"


def test_endpoint_falls_back_to_a_short_folder_where_the_temporary_one_is_long(
    surroundings, monkeypatch
):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(surroundings / ("long" * 25)))
    path = Endpoint.for_engine("engine").path
    assert len(str(path)) <= 107
    assert path.parent.name == f"kvxfer-{os.geteuid()}"


def test_endpoint_ignores_the_runtime_folder_of_another_user(surroundings, monkeypatch):
    runtime = surroundings / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(os, "geteuid", lambda: runtime.stat().st_uid + 1)
    assert Endpoint.for_engine("a").path.parent != runtime / "kvxfer"


def test_endpoint_refuses_a_path_that_does_not_fit(folder):
    with pytest.raises(ConfigError, match=rf"holds {MAX_PATH_BYTES}: choose a folder"):
        Endpoint.for_engine("a", folder=folder / ("x" * 90))


def test_endpoint_takes_the_longest_path_that_fits(folder, closing):
    path = folder / ("x" * (MAX_PATH_BYTES - len(str(folder)) - 1))
    listen(Endpoint(path), closing).remove_file()
    with pytest.raises(ConfigError, match="bytes long"):
        Endpoint(Path(f"{path}x"))


def test_endpoint_refuses_a_relative_path():
    with pytest.raises(ConfigError, match="absolute"):
        Endpoint(Path("lookup.sock"))


def test_endpoint_makes_a_folder_that_only_its_owner_may_enter(folder):
    endpoint = Endpoint.for_engine("a", folder=folder / "new")
    old_umask = os.umask(0)
    try:
        endpoint.ensure_private_folder()
    finally:
        os.umask(old_umask)
    assert stat.S_IMODE((folder / "new").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o750, 0o777, 0o1777], ids=oct)
def test_endpoint_refuses_a_folder_that_others_can_enter(folder, mode):
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}"):
        Endpoint.for_engine("a", folder=folder).ensure_private_folder()


def test_endpoint_refuses_a_folder_of_another_user(folder, monkeypatch):
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}"):
        Endpoint.for_engine("a", folder=folder).ensure_private_folder()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_endpoint_refuses_what_is_not_a_folder(folder, kind):
    place = folder / "place"
    if kind == "link":
        (folder / "real").mkdir(mode=0o700)
        place.symlink_to(folder / "real")
    else:
        place.touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        Endpoint.for_engine("a", folder=place).ensure_private_folder()


def test_endpoint_says_why_a_folder_cannot_be_made(folder):
    with pytest.raises(ConfigError, match="cannot be made"):
        Endpoint.for_engine("a", folder=folder / "missing" / "new").ensure_private_folder()


def test_listen_replaces_the_file_of_a_dead_server(endpoint, closing):
    endpoint.listen().listening.close()  # dies without removing its file
    assert endpoint.path.exists()
    listener = listen(endpoint, closing)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(endpoint.path))
    listener.remove_file()
    assert not endpoint.path.exists()


def test_listen_refuses_the_path_of_a_live_server(endpoint, closing):
    first = listen(endpoint, closing)
    with pytest.raises(ConfigError, match="own engine_id"):
        endpoint.listen()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(endpoint.path))
    first.remove_file()


def test_listen_leaves_a_file_that_is_not_a_socket(endpoint):
    endpoint.path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        endpoint.listen()
    assert endpoint.path.read_text() == "precious"


def test_listener_frees_its_path_once(endpoint, closing):
    first = listen(endpoint, closing)
    first.remove_file()
    assert not endpoint.path.exists()
    second = listen(endpoint, closing)
    first.remove_file()
    assert endpoint.path.exists()
    second.remove_file()


def test_listener_outlives_its_folder(folder, closing):
    endpoint = Endpoint.for_engine("a", folder=folder / "new")
    listener = listen(endpoint, closing)
    endpoint.path.unlink()
    endpoint.path.parent.rmdir()
    listener.remove_file()
