"""The edge of a command: options made from settings, one line and one exit code per failure."""

from __future__ import annotations

import errno

import click
import pytest
from click.testing import CliRunner

from decoupled_diloco.config import cli_errors, click_options, load_settings
from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.settings import RunSettings


def seen_by(arguments, **options):
    """The parameters that a command made from RunSettings receives."""
    seen = {}

    @click.command()
    @click_options(RunSettings, **options)
    def command(**kwargs):
        seen.update(kwargs)

    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen


def test_every_setting_becomes_one_option_that_is_none_unless_given():
    seen = seen_by([])
    assert len(seen) == len(RunSettings.__dataclass_fields__)
    assert set(seen.values()) == {None}


def test_given_options_arrive_typed_and_reach_the_settings():
    seen = seen_by(["--num-learners", "3", "--no-grace", "--grace-gamma", "0.5"])
    loaded = load_settings(RunSettings, flags=seen, environ={}, file=None, section="run")
    assert (loaded.value.num_learners, loaded.value.grace) == (3, False)
    assert loaded.value.grace_gamma == 0.5
    assert [name for name, origin in loaded.origins.items() if origin == "flag"] == [
        "num_learners",
        "grace",
        "grace_gamma",
    ]


def test_include_and_exclude_choose_the_options():
    assert set(seen_by([], include=["quorum", "grace"])) == {"quorum", "grace"}
    assert "trainer_json" not in seen_by([], exclude=["trainer_json"])


def test_help_shows_what_a_setting_does_and_its_default():
    @click.command()
    @click_options(RunSettings, include=["sync_interval", "grace"])
    def command(**kwargs):
        raise AssertionError

    text = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    assert "--sync-interval INTEGER H: inner steps between two merges" in text
    assert "[default: 24]" in text
    assert "--grace / --no-grace" in text
    assert "[default: true]" in text


def ended(capfd, work):
    with pytest.raises(SystemExit) as stop:
        cli_errors(work)()
    return stop.value.code, capfd.readouterr().err


def raising(error):
    def work():
        raise error

    return work


def test_an_error_of_ours_is_one_line_and_its_exit_code(capfd):
    code, err = ended(capfd, raising(UsageError(Reason.DATA_EMPTY, "no text in a.txt;\nadd some")))
    assert (code, err) == (64, "error: DATA_EMPTY: no text in a.txt; add some\n")
    code, err = ended(capfd, raising(DilocoError(Reason.STORE_CORRUPT, "x")))
    assert (code, err) == (74, "error: STORE_CORRUPT: x\n")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--quorums", "1"], "CONFIG_UNKNOWN_KEY"),
        (["--quorum", "many"], "CONFIG_INVALID"),
        (["extra"], "CONFIG_INVALID"),
    ],
)
def test_wrong_arguments_end_with_the_usage_exit_code(capfd, arguments, reason):
    @click.command()
    @click_options(RunSettings)
    def command(**kwargs):
        raise AssertionError

    code, err = ended(capfd, lambda: command.main(arguments, standalone_mode=False))
    assert code == 64
    assert err.startswith(f"error: {reason}: ")
    assert err.count("\n") == 1


def test_help_ends_well(capfd):
    @click.command()
    def command():
        raise AssertionError

    code, err = ended(capfd, lambda: command.main(["--help"], standalone_mode=False))
    assert (code, err) == (0, "")


def test_a_group_without_a_command_shows_its_help_and_ends_with_the_usage_exit_code(capfd):
    @click.group()
    def group():
        raise AssertionError

    code, err = ended(capfd, lambda: group.main([], standalone_mode=False))
    assert code == 64
    assert err.startswith("Usage: ")
    assert "error:" not in err


def test_what_nobody_expected_is_logged_with_its_traceback_and_ends_with_70(capfd, caplog):
    code, err = ended(capfd, raising(RuntimeError("surprise")))
    assert code == 70
    assert err.splitlines()[-1] == "error: INTERNAL: RuntimeError: surprise"
    assert caplog.records[-1].exc_info[1].args == ("surprise",)


def test_a_full_disk_is_named(capfd):
    code, err = ended(capfd, raising(OSError(errno.ENOSPC, "No space left on device", "a.bin")))
    assert code == 74
    assert err.startswith("error: DISK_FULL: ")
    assert "a.bin" in err


def test_ctrl_c_ends_without_a_traceback(capfd):
    code, err = ended(capfd, raising(KeyboardInterrupt()))
    assert (code, err) == (130, "")


@pytest.mark.parametrize(("result", "expected"), [(None, 0), (143, 143), ("text", 0)])
def test_a_number_that_the_command_returns_is_the_exit_code(capfd, result, expected):
    assert ended(capfd, lambda: result)[0] == expected


def test_an_exit_code_that_the_command_chose_stays(capfd):
    assert ended(capfd, raising(SystemExit(143)))[0] == 143
