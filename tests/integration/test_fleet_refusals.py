"""Bad input to a real `diloco run`: one clear line, a reason, an exit code, and nothing left."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from fleet_harness import assert_refused, diloco

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join((str(ROOT / "protos"), str(ROOT)))


@pytest.mark.parametrize(
    ("arguments", "reason", "words"),
    [
        (["--learning-rat", "1"], "CONFIG_UNKNOWN_KEY", ["--learning-rate"]),
        (["--config", "unknown.toml"], "CONFIG_UNKNOWN_KEY", ["quorom", "quorum"]),
        (["--config", "torn.toml"], "CONFIG_INVALID", ["torn.toml"]),
        (["--num-fragments", "2"], "CONFIG_CONFLICT", ["num_fragments", "overlap"]),
        (["--quorum", "5"], "QUORUM_ABOVE_LEARNERS", ["quorum is 5", "4 learners"]),
        (["--preset", "huge"], "CONFIG_INVALID", ["huge", "tiny", "large"]),
        (["--data", "nothing.txt"], "DATA_MISSING", ["nothing.txt"]),
        (["--data", "empty.txt"], "DATA_EMPTY", ["empty.txt"]),
        (["--data", "empty"], "DATA_EMPTY", ["empty"]),
        (["--data", "binary.txt"], "DATA_BINARY", ["binary.txt", "NUL"]),
        (["--learning-rate", "nan"], "CONFIG_INVALID", ["learning_rate"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_clear_error(
    arguments: list[str],
    reason: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "unknown.toml").write_text("[run]\nquorom = 2\n")
    (tmp_path / "torn.toml").write_text("[run]\nquorum = \n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.txt").write_bytes(b"text\0" * 100)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setenv("PYTHONPATH", PATHS)
    monkeypatch.chdir(tmp_path)
    assert_refused(diloco("run", "--device", "cpu", *arguments), reason, *words)
    left = [path for path in tmp_path.iterdir() if path not in before]
    assert not [path for folder in left for path in folder.iterdir()], "no run is left behind"


def test_a_disk_too_small_for_the_run_is_told_before_anything_starts(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        result = diloco("run", "--device", "cpu", "--run-dir", str(disk / "run"))
        assert_refused(result, "DISK_FULL", str(disk), code=74)
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)
