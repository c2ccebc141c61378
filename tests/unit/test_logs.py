# SPDX-License-Identifier: Apache-2.0
import logging

import pytest

from kvxfer.observe.logs import join_vllm_logging


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def loggers(monkeypatch):
    ours, theirs = logging.getLogger("kvxfer"), logging.getLogger("vllm")
    for logger in (ours, theirs):
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
        monkeypatch.setattr(logger, "level", logging.NOTSET)
    return ours, theirs


def test_kvxfer_logs_where_vllm_does(loggers):
    ours, theirs = loggers
    theirs.addHandler(kept := Kept())
    theirs.setLevel(logging.INFO)
    join_vllm_logging()
    join_vllm_logging()
    logging.getLogger("kvxfer.worker").info("hello")
    logging.getLogger("kvxfer.worker").debug("not this")
    assert kept.lines == ["hello"]
    assert not ours.propagate


def test_configured_logger_is_left_alone(loggers):
    ours, theirs = loggers
    theirs.addHandler(Kept())
    ours.addHandler(own := Kept())
    join_vllm_logging()
    assert ours.handlers == [own]


def test_without_vllm_logging_nothing_changes(loggers):
    ours, _ = loggers
    join_vllm_logging()
    assert ours.handlers == []
    assert ours.propagate
