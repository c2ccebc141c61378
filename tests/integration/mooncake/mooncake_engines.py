# SPDX-License-Identifier: Apache-2.0
"""Engines of one test module, started two at a time: a start keeps one core busy for long."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from engine_harness import Engine

NUM_AT_ONCE = 2


class Engines:
    """Starts engines and ends those that are left at the end."""

    def __init__(self, folder):
        self._folder = folder
        self._engines = []
        self._num_started = 0

    def start(self, *settings):
        """Return an engine for each of the settings, in their order, once all have started."""
        folders = [self._new_folder() for _ in settings]
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            starts = [threads.submit(Engine, *each) for each in zip(settings, folders, strict=True)]
        self._engines += [start.result() for start in starts if start.exception() is None]
        return [start.result() for start in starts]

    def kill_all(self):
        for engine in self._engines:
            engine.kill()

    def _new_folder(self):
        folder = self._folder / f"engine-{self._num_started}"
        folder.mkdir()
        self._num_started += 1
        return folder
