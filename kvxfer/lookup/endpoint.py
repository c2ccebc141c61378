# SPDX-License-Identifier: Apache-2.0
"""Where the lookup channel of one engine lies, who may reach it, and how a server claims it.

The socket file is in a folder that only this user may enter: whoever could write there could
answer lookups. The folder is ``$XDG_RUNTIME_DIR/kvxfer`` where that fits, else
``<temporary folder>/kvxfer-<uid>``, else the same under ``/tmp``; both processes of an engine see
the same environment and so choose the same one. The file is named after the engine, its
data-parallel rank and the worker's rank, so two engines on one host never meet.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvxfer.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 5.0
"""How long a server waits for another one that looks at the folder, which takes microseconds."""
_LOCK_PAUSE_S = 0.002

MAX_PATH_BYTES = 107  # sun_path is 108 bytes on Linux, its terminator included
_BACKLOG = 64  # one client connects; the rest is room for reconnects and probes


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The ``ipc://`` address of one engine's lookup channel; a value, it holds nothing open."""

    path: Path

    def __post_init__(self) -> None:
        if not self.path.is_absolute():
            raise ConfigError(f"lookup endpoint {self.path} must be an absolute path")
        if not _fits(self.path):
            raise ConfigError(
                f"lookup endpoint {self.path} is {len(os.fsencode(self.path))} bytes long, a Unix "
                f"socket path holds {MAX_PATH_BYTES}: choose a folder with a shorter path"
            )

    @classmethod
    def for_engine(
        cls,
        engine_id: str,
        dp_rank: int = 0,
        folder: str | os.PathLike[str] | None = None,
        *,
        rank: int = 0,
    ) -> Endpoint:
        """Return the endpoint of an engine; equal arguments and environment give equal paths.

        ``engine_id`` may be any text: its digest stands in the name. ``rank`` is the worker's
        among those of its engine; 0 answers lookups. ``folder`` replaces the default one. Raises
        ``ConfigError`` where no folder gives a path that fits.
        """
        digest = hashlib.sha256(engine_id.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        name = f"lookup-{digest}-dp{dp_rank}-rank{rank}.sock"
        folders = [Path(os.path.abspath(folder))] if folder is not None else _default_folders()
        paths = [parent / name for parent in folders]
        return cls(next(filter(_fits, paths), paths[-1]))

    @property
    def url(self) -> str:
        """The address as ZMQ takes it."""
        return f"ipc://{self.path}"

    def ensure_private_folder(self) -> None:
        """Make the folder (0700) if it is missing; refuse one that others own or can enter.

        Raises ``ConfigError``, also where the folder cannot be made.
        """
        folder = self.path.parent
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            status = folder.lstat()
        except OSError as error:
            raise ConfigError(f"lookup folder {folder} cannot be made: {error}") from error
        if problem := _folder_problem(status):
            raise ConfigError(
                f"lookup folder {folder} {problem}: remove it, or set another folder that only "
                "this user may enter (mode 0700)"
            )

    def listen(self) -> Listener:
        """Bind and listen at the path, in place of a file that a dead server left there.

        Raises ``ConfigError`` where a live server listens already, something that is not a socket
        is in the way, or another process keeps the folder locked for ``LOCK_TIMEOUT_S``.
        """
        self.ensure_private_folder()
        with contextlib.ExitStack() as undo, _locked(self.path.parent) as inside:
            if not inside:
                raise ConfigError(
                    f"lookup folder {self.path.parent} has been locked by another process for "
                    f"{LOCK_TIMEOUT_S} s: end that process, or set another folder"
                )
            self._remove_stale_file()
            listening = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                listening.bind(str(self.path))
                listening.listen(_BACKLOG)
            except OSError as error:
                raise ConfigError(f"lookup endpoint {self.path}: cannot bind: {error}") from error
            undo.pop_all()
        return Listener(self.path, listening)

    def _remove_stale_file(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(f"{self.path} is not a socket: remove it, or set another folder")
        if _is_served(self.path):
            raise ConfigError(
                f"the lookup endpoint {self.path} is served already: give each engine on this "
                "host its own engine_id in kv_transfer_config, and each KVXferConnector inside a "
                "MultiConnector its own cache_prefix or store"
            )
        self.path.unlink()


@dataclass(slots=True)
class Listener:
    """A listening socket and its file.

    The file is to be removed while the socket still listens: until then no other server can
    take the path, and so no other server's file can be removed by mistake.
    """

    path: Path
    listening: socket.socket
    _file_removed: bool = False  # guarded by the folder's lock
    _given_up: bool = False

    def detach(self) -> int:
        """Return the descriptor; from here on the caller closes it."""
        return self.listening.detach()

    def remove_file(self) -> None:
        """Remove the file and free the path; idempotent, also where the file is gone already.

        Where another process keeps the folder locked for ``LOCK_TIMEOUT_S`` the file stays, and
        the next server of the path replaces it.
        """
        if self._given_up:
            return
        with contextlib.suppress(FileNotFoundError), _locked(self.path.parent) as inside:
            if not inside:
                self._given_up = True
                logger.warning("%s is left behind: its folder is locked", self.path)
            elif not self._file_removed:
                self._file_removed = True
                self.path.unlink()


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= MAX_PATH_BYTES


def _default_folders() -> list[Path]:
    """Return the candidates in order of preference; the last one is short and always there."""
    temporary = (Path(os.path.abspath(tempfile.gettempdir())), Path("/tmp"))
    folders = [folder / f"kvxfer-{os.geteuid()}" for folder in temporary]
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    # A runtime folder of someone else (kept by sudo, say) could be swapped under our feet.
    with contextlib.suppress(OSError):
        if runtime.is_absolute() and runtime.stat().st_uid == os.geteuid():
            folders.insert(0, runtime / "kvxfer")
    return folders


def _folder_problem(status: os.stat_result) -> str | None:
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(status.st_mode):04o}, open to other users"
    return None


def _is_served(path: Path) -> bool:
    """Return whether a process listens behind a socket file; never blocks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # A full backlog is EAGAIN: somebody listens, if slowly.
        return probe.connect_ex(str(path)) in (0, errno.EAGAIN)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock: between a look at a file and its removal no other server acts.

    False where another process kept it for ``LOCK_TIMEOUT_S``, being stopped perhaps.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _lock_within(descriptor, LOCK_TIMEOUT_S)
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile has the descriptor too
        os.close(descriptor)


def _lock_within(descriptor: int, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_LOCK_PAUSE_S)
