"""``diloco prepare``: everything that processes need which `diloco run` does not start."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from decoupled_diloco.config import load_settings
from decoupled_diloco.settings import RunSettings
from diloco_fleet.commands.prepare import command
from diloco_fleet.run_files import RunFiles
from learner_client.train.corpus import open_corpus
from synchronizer_server.cli import SECTIONS
from synchronizer_server.server import read_key


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Enough to train on."""
    path = tmp_path / "text.txt"
    path.write_text("All work and no play makes a dull corpus. " * 200)
    return path


def prepare(root: Path, *arguments: str, **variables: object) -> Result:
    environment = {f"DILOCO_{name.upper()}": str(value) for name, value in variables.items()}
    result = CliRunner().invoke(command, ["--run-dir", str(root), *arguments], env=environment)
    if isinstance(result.exception, Exception):
        raise result.exception
    return result


def served(files: RunFiles) -> RunSettings:
    """The settings as a synchronizer reads them."""
    others = {name: cls for name, cls in SECTIONS.items() if name != "run"}
    return load_settings(
        RunSettings,
        flags={"trainer_json": files.trainer.read_text()},
        environ={},
        file=files.synchronizer_config,
        section="run",
        others=others,
    ).value


def test_a_synchronizer_and_learners_find_what_they_need(tmp_path: Path, text: Path) -> None:
    files, key = RunFiles(tmp_path / "run"), tmp_path / "secret" / "key"
    key.parent.mkdir()
    result = prepare(
        files.root, "--key-file", str(key), data=text, num_learners=3, data_mode="leases"
    )
    assert "run run is prepared" in result.output
    run = served(files)
    corpus = open_corpus(files.data, json.loads(run.trainer_json)["corpus_hash"])
    assert (run.run_id, run.num_learners) == ("run", 3)
    assert run.data_length == corpus.info.num_tokens // 128
    assert len(read_key(key)) == 64
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_prepared_again_it_keeps_corpus_and_key_and_takes_what_is_given_now(
    tmp_path: Path, text: Path
) -> None:
    files, key = RunFiles(tmp_path / "run"), tmp_path / "key"
    prepare(files.root, "--key-file", str(key), data=text, quorum=2)
    before = served(files), key.read_bytes(), (files.data / "corpus.json").stat().st_mtime_ns
    text.unlink()
    prepare(files.root, "--key-file", str(key), total_global_steps=77)
    run = served(files)
    assert (before[0].quorum, before[0].total_global_steps) == (2, 800)
    assert (run.quorum, run.total_global_steps) == (2, 77)
    assert before[1:] == (key.read_bytes(), (files.data / "corpus.json").stat().st_mtime_ns)


def test_what_was_interrupted_is_taken_up(tmp_path: Path, text: Path) -> None:
    files = RunFiles(tmp_path / "run")
    prepare(files.root, data=text)
    files.config.unlink()
    files.trainer.unlink()
    prepare(files.root, data=text)
    assert served(files).trainer_json
