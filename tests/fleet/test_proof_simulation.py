"""The proof by simulated worlds: it goes on where it stopped, and only with the same code."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.proofs import simulation


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "simulation.json"
    monkeypatch.setattr(simulation, "STATE", path)
    monkeypatch.setattr(simulation, "CHUNK", 2)
    return path


def prove(*arguments: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(simulation.main, arguments)
    return result.exit_code, result.stdout.splitlines()


def test_it_goes_on_where_it_stopped_and_says_the_same(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prove("--seeds", "6", "--first", "40")
    assert whole[0] == 0
    assert whole[1][-1] == "no invariant was broken"
    state.unlink()
    prove("--seeds", "4", "--first", "40")

    def is_new(first: int, number: int) -> object:
        assert first == 44, "the others have held"
        return run_chunk(first, number)

    run_chunk = simulation.run_chunk
    monkeypatch.setattr(simulation, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(simulation, "run_chunk", is_new)
    rest = prove("--seeds", "6", "--first", "40")
    told = [[x for x in lines if " s of one core" not in x and " to go" not in x]
            for lines in (whole[1], rest[1])]  # fmt: skip
    assert told[0] == told[1]
    assert any(line.startswith("6 worlds") for line in rest[1])


def test_other_code_starts_anew(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove("--seeds", "2", "--first", "40")
    kept = state.read_text()
    monkeypatch.setattr(simulation, "code_digest", lambda: "another")
    assert simulation.Sums.from_json(kept, "another") == simulation.Sums()
    prove("--seeds", "2", "--first", "40")
    assert '"code": "another"' in state.read_text()


def test_a_world_that_fails_is_told_and_never_counts_as_held(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(simulation, "run_world", fails)
    code, lines = prove("--seeds", "4", "--first", "40")
    assert code == 1
    assert "AssertionError: seed 41 is broken" in lines
    assert "no invariant was broken" not in lines
    assert not state.exists()


def fails(seed: int) -> object:
    raise AssertionError(f"seed {seed} is broken")


class InThisProcess:
    """An executor without processes: what is patched is patched there, too."""

    def __init__(self, _: int | None) -> None:
        """As the real one."""

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is to be ended."""

    def shutdown(self, *, cancel_futures: bool) -> None:
        assert cancel_futures

    def submit(self, call, *arguments):  # type: ignore[no-untyped-def]
        return Done(call(*arguments))


class Done:
    """A future that is there."""

    def __init__(self, value: object) -> None:
        self._value = value

    def result(self) -> object:
        return self._value
