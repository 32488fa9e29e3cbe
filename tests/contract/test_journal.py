"""The journal loses lines rather than training, and says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from decoupled_diloco.journal import Journal


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in path.read_text().splitlines() if line.strip()]


def test_without_a_path_nothing_is_written(tmp_path):
    Journal(None).write("start")
    assert not list(tmp_path.iterdir())


def test_lives_append_to_one_file(tmp_path):
    path = tmp_path / "deeper" / "journal.jsonl"
    for kind in ("start", "again"):
        journal = Journal(path, wall=lambda: 7.0)
        journal.write(kind, term=1)
        journal.close()
        journal.write("after the end")
    assert kinds(path) == ["start", "again"]
    assert path.read_text().count("\n") == 2
    assert json.loads(path.read_text().splitlines()[0]) == {"kind": "start", "time": 7.0, "term": 1}


def test_a_line_torn_by_a_death_harms_no_other(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"kind": "start"}\n{"kind": "rou')
    journal = Journal(path)
    journal.write("start")
    journal.close()
    lines = path.read_text().splitlines()
    assert lines[1] == '{"kind": "rou'
    assert json.loads(lines[2])["kind"] == "start"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_costs_lines_and_is_said_once_at_each_end(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write("before")
    with Path("/dev/full").open("ab", buffering=0) as full:
        disk, journal._file = journal._file, full
        journal.write("lost")
        journal.write("lost too")
        journal._file = disk
    journal.write("after")
    journal.write("later")
    journal.close()
    assert kinds(path) == ["before", "after", "later"]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "2 lines were lost" in caplog.text


def test_an_observer_hears_of_every_event_with_a_file_and_without(tmp_path):
    for path in (None, tmp_path / "journal.jsonl"):
        heard = []
        journal = Journal(
            path, observer=lambda kind, fields, heard=heard: heard.append((kind, fields))
        )
        journal.write("start", term=1)
        journal.close()
        journal.write("stop")
        assert heard == [("start", {"term": 1}), ("stop", {})]
