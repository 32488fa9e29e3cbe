"""Which learner a process is: given, kept, or new."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoupled_diloco.errors import Reason, UsageError
from learner_client.settings import LearnerSettings
from learner_client.train.identity import identified


def learner_id(given: str, file: Path | None) -> str:
    return identified(LearnerSettings(learner_id=given, learner_id_file=file)).learner_id


def test_a_new_id_is_kept_for_the_next_life_and_no_two_are_alike(tmp_path: Path) -> None:
    first = learner_id("", tmp_path / "a" / "learner-id")
    assert first.startswith("learner-")
    assert learner_id("", tmp_path / "a" / "learner-id") == first
    assert learner_id("", tmp_path / "b" / "learner-id") != first


def test_a_given_id_comes_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "learner-id"
    assert learner_id("mine", path) == "mine"
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"  \n", b"a b", b"../x", b"\xff\xfe", b"a" * 300])
def test_a_file_without_an_id_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "learner-id"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="holds no id") as caught:
        learner_id("", path)
    assert caught.value.reason is Reason.CONFIG_INVALID
    assert path.read_bytes() == content


def test_neither_an_id_nor_a_file_is_refused() -> None:
    with pytest.raises(UsageError, match="give --learner-id"):
        learner_id("", None)
