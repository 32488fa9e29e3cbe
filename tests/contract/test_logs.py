"""Logs: one event per line, facts as fields, a reason once per change."""

from __future__ import annotations

import io
import json
import logging

import pytest

from decoupled_diloco.logs import ChangeLogger, configure_logging


@pytest.fixture
def root():
    """The root logger, put back as it was."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logging.captureWarnings(capture=False)


@pytest.fixture
def logged(root):
    """Configures logging to a buffer and returns the lines written so far."""
    buffer = io.StringIO()

    def configure(log_format, level="INFO"):
        configure_logging(log_format=log_format, level=level, process="learner-0", stream=buffer)
        return lambda: buffer.getvalue().splitlines()

    return configure


def test_json_lines_carry_time_level_logger_process_message_and_the_extra_fields(logged):
    lines = logged("json")
    extra = {"round": 3, "who": ["a"], "level": "mine", "path": io}
    logging.getLogger("x.y").warning("%s\nhappened", "it", extra=extra)
    (line,) = lines()
    event = json.loads(line)
    assert event.pop("time").endswith("+00:00")
    assert event.pop("path") == str(io)
    assert event == {
        "level": "WARNING",
        "logger": "x.y",
        "process": "learner-0",
        "message": "it\nhappened",
        "round": 3,
        "who": ["a"],
    }
    assert list(json.loads(line))[:5] == ["time", "level", "logger", "process", "message"]


def test_json_puts_a_traceback_into_a_field_of_the_same_line(logged):
    lines = logged("json")
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("x").exception("failed")
    (line,) = lines()
    assert "RuntimeError: boom" in json.loads(line)["exception"]


def test_text_lines_carry_time_level_letter_process_message_and_fields(logged):
    lines = logged("text")
    extra = {"round": 3, "why": "too late", "path": 'a="b"'}
    logging.getLogger("x").error("two\nlines", extra=extra)
    (line,) = lines()
    clock, rest = line.split(" ", 1)
    assert len(clock) == len("12:34:56.789")
    assert rest == r'E learner-0 two\nlines round=3 why="too late" path="a=\"b\""'


def test_the_level_filters_and_configuring_again_replaces(logged):
    lines = logged("text", level="WARNING")
    logging.getLogger("x").info("quiet")
    assert lines() == []
    logged("text")
    logging.getLogger("x").info("once")
    assert len(lines()) == 1


def test_a_reason_is_logged_once_per_change(caplog):
    caplog.set_level(logging.INFO)
    changes = ChangeLogger(logging.getLogger("waits"))
    said = [
        changes.log("round 1", "quorum", "2 of 3 fresh", fresh=2),
        changes.log("round 1", "quorum", "still 2 of 3"),
        changes.log("round 2", "earlier_round"),
        changes.log("round 1", "grace"),
        changes.log("round 1", "quorum"),
    ]
    assert said == [True, False, True, True, True]
    assert [record.getMessage() for record in caplog.records] == [
        "round 1: quorum: 2 of 3 fresh",
        "round 2: earlier_round",
        "round 1: grace",
        "round 1: quorum",
    ]
    first = caplog.records[0]
    assert (first.subject, first.reason, first.fresh) == ("round 1", "quorum", 2)
    assert changes.reason("round 1") == "quorum"


def test_a_forgotten_subject_is_news_again(caplog):
    changes = ChangeLogger(logging.getLogger("waits"))
    changes.log("link", "offline")
    changes.forget("link")
    changes.forget("link")
    assert changes.reason("link") is None
    assert changes.log("link", "offline") is True
