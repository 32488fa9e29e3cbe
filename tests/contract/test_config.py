"""Settings: precedence, origins, and one clear refusal for each way to get them wrong."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.config import load_settings
from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.settings import RunSettings

MANUAL = Path("manual.txt")


def option(default, help_text="what it does", **metadata):
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    name: str = option("diesel")
    cylinders: int = option(4)
    power: float = option(75.0)
    turbo: bool = option(False)
    manual: Path = field(default=MANUAL, metadata={"help": "a book"})
    owner: str | None = option(None)
    year: int | None = option(None)
    fuels: tuple[str, ...] = option(())
    password: str | None = option(None, secret=True)

    def __post_init__(self):
        if self.cylinders < 1:
            raise UsageError(Reason.CONFIG_CONFLICT, f"cylinders is {self.cylinders}; at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheels:
    diameter: int = option(17)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    train: str = field(metadata={"help": "which train"})


def load(text=None, *, tmp_path=None, flags=None, environ=None, section="engine", cls=Engine, **kw):
    file = None
    if text is not None:
        file = tmp_path / "run.toml"
        file.write_text(text)
    return load_settings(
        cls, flags=flags or {}, environ=environ or {}, file=file, section=section, **kw
    )


def refusal(*args, **kwargs):
    with pytest.raises(UsageError) as caught:
        load(*args, **kwargs)
    return caught.value


def test_precedence_is_flag_then_environment_then_file_then_default(tmp_path):
    text = "[engine]\nname = 'file'\ncylinders = 3\npower = 3\n"
    environ = {"DILOCO_NAME": "env", "DILOCO_CYLINDERS": "2"}
    loaded = load(text, tmp_path=tmp_path, environ=environ, flags={"name": "flag", "turbo": None})
    assert (loaded.value.name, loaded.value.cylinders, loaded.value.power) == ("flag", 2, 3.0)
    assert loaded.value.turbo is False
    assert loaded.origins["name"] == "flag"
    assert loaded.origins["cylinders"] == "env"
    assert loaded.origins["power"] == "file"
    assert loaded.origins["turbo"] == "default"


def test_description_names_every_value_that_is_not_the_default_with_its_origin(tmp_path):
    loaded = load(
        "[engine]\npower = 1.5\n",
        tmp_path=tmp_path,
        flags={"fuels": ("a", "b")},
        environ={"DILOCO_PASSWORD": "hunter2"},
    )
    assert loaded.describe() == [
        "engine.power = 1.5  (file)",
        'engine.fuels = ["a", "b"]  (flag)',
        "engine.password = ***  (env)",
    ]


def test_a_false_flag_beats_a_true_variable():
    loaded = load(flags={"turbo": False}, environ={"DILOCO_TURBO": "yes"})
    assert loaded.value.turbo is False
    assert loaded.origins["turbo"] == "flag"


def test_a_repeatable_flag_that_was_not_given_leaves_the_environment_to_speak():
    assert load(flags={"fuels": ()}, environ={"DILOCO_FUELS": "a, b,"}).value.fuels == ("a", "b")


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("DILOCO_TURBO", "On", "turbo", True),
        ("DILOCO_TURBO", "0", "turbo", False),
        ("DILOCO_CYLINDERS", "12", "cylinders", 12),
        ("DILOCO_POWER", "1e3", "power", 1000.0),
        ("DILOCO_MANUAL", "a/b", "manual", Path("a/b")),
        ("DILOCO_OWNER", "me", "owner", "me"),
        ("DILOCO_OWNER", "", "owner", None),
        ("DILOCO_YEAR", "none", "year", None),
        ("DILOCO_YEAR", "1999", "year", 1999),
    ],
)
def test_a_variable_is_read_as_the_type_of_its_setting(variable, text, name, value):
    assert getattr(load(environ={variable: text}).value, name) == value


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"DILOCO_TURBO": "perhaps"}, "true or false"),
        ({"DILOCO_CYLINDERS": "4.5"}, "a whole number"),
        ({"DILOCO_POWER": "much"}, "a number"),
        ({"DILOCO_MANUAL": ""}, "a path"),
    ],
)
def test_a_variable_of_the_wrong_type_is_refused_with_its_name_and_what_was_expected(
    environ, expected
):
    error = refusal(environ=environ)
    assert error.reason is Reason.CONFIG_INVALID
    assert next(iter(environ)) in error.message
    assert expected in error.message


@pytest.mark.parametrize(
    "line",
    [
        "turbo = 1",
        "turbo = 'true'",
        "cylinders = 4.0",
        "cylinders = true",
        "power = true",
        "power = '75'",
        "name = 3",
        "manual = 1",
        "fuels = 'a'",
        "fuels = [1]",
        "owner = 1",
    ],
)
def test_a_value_of_the_wrong_type_in_the_file_is_refused_with_file_and_key(tmp_path, line):
    error = refusal(f"[engine]\n{line}\n", tmp_path=tmp_path)
    assert error.reason is Reason.CONFIG_INVALID
    assert "run.toml" in error.message
    assert f"[engine] {line.split()[0]}" in error.message


def test_a_secret_of_the_wrong_type_is_not_shown(tmp_path):
    assert "4711" not in refusal("[engine]\npassword = 4711\n", tmp_path=tmp_path).message


def test_an_unknown_key_is_refused_with_the_nearest_name(tmp_path):
    error = refusal("[engine]\ncylinder = 3\n", tmp_path=tmp_path)
    assert error.reason is Reason.CONFIG_UNKNOWN_KEY
    assert "did you mean cylinders?" in error.message
    assert "[engine]" in error.message


def test_an_unknown_section_is_refused_with_the_nearest_name(tmp_path):
    error = refusal("[wheel]\ndiameter = 3\n", tmp_path=tmp_path, others={"wheels": Wheels})
    assert error.reason is Reason.CONFIG_UNKNOWN_KEY
    assert "did you mean wheels?" in error.message


def test_an_unknown_key_in_another_section_of_the_file_is_refused_too(tmp_path):
    text = "[engine]\n[wheels]\ndiametre = 3\n"
    error = refusal(text, tmp_path=tmp_path, others={"wheels": Wheels})
    assert error.reason is Reason.CONFIG_UNKNOWN_KEY
    assert "did you mean diameter?" in error.message


def test_an_unknown_variable_with_our_prefix_is_refused_with_the_nearest_name():
    error = refusal(environ={"DILOCO_CYLINDER": "3"})
    assert error.reason is Reason.CONFIG_UNKNOWN_KEY
    assert "did you mean DILOCO_CYLINDERS?" in error.message


def test_variables_of_the_other_dataclasses_and_other_programs_are_left_alone(tmp_path):
    environ = {"DILOCO_DIAMETER": "3", "PATH": "/bin", "HOME": "/"}
    assert load(environ=environ, others={"wheels": Wheels}).value == Engine()


def test_one_file_serves_several_dataclasses(tmp_path):
    text = "[engine]\ncylinders = 6\n[wheels]\ndiameter = 19\n"
    engine = load(text, tmp_path=tmp_path, others={"wheels": Wheels})
    wheels = load(text, tmp_path=tmp_path, cls=Wheels, section="wheels", others={"engine": Engine})
    assert (engine.value.cylinders, wheels.value.diameter) == (6, 19)


def test_without_a_section_the_top_level_of_the_file_is_read(tmp_path):
    loaded = load("cylinders = 6\n", tmp_path=tmp_path, section=None)
    assert loaded.value.cylinders == 6
    error = refusal("cilinders = 6\n", tmp_path=tmp_path, section=None)
    assert "did you mean cylinders?" in error.message


def test_a_section_that_is_no_table_is_refused(tmp_path):
    assert refusal("engine = 3\n", tmp_path=tmp_path).reason is Reason.CONFIG_INVALID


@pytest.mark.parametrize("content", [b"[engine\n", b"name = \xff\xfe", b"a = 1\na = 2\n"])
def test_a_malformed_file_is_refused_with_its_path(tmp_path, content):
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"bad\.toml cannot be read") as caught:
        load_settings(Engine, flags={}, environ={}, file=file, section="engine")
    assert caught.value.reason is Reason.CONFIG_INVALID


@pytest.mark.parametrize("path", ["/dev/zero", "large.toml"])
def test_what_is_no_ordinary_file_is_refused_before_it_is_read(tmp_path, path):
    (tmp_path / "large.toml").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(UsageError, match="regular file"):
        load_settings(Engine, flags={}, environ={}, file=tmp_path / path, section="engine")


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_file_that_is_not_there_or_is_a_folder_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="cannot be read") as caught:
        load_settings(Engine, flags={}, environ={}, file=tmp_path / name, section="engine")
    assert caught.value.reason is Reason.CONFIG_INVALID


def test_a_required_setting_that_is_missing_is_refused_with_every_way_to_give_it():
    error = refusal(cls=Ticket, section="ticket")
    assert error.reason is Reason.CONFIG_INVALID
    for way in ("--train", "DILOCO_TRAIN", "[ticket] train"):
        assert way in error.message
    assert load(cls=Ticket, section="ticket", flags={"train": "late"}).value.train == "late"


def test_a_refusal_by_the_dataclass_says_where_the_value_came_from():
    error = refusal(environ={"DILOCO_CYLINDERS": "0", "DILOCO_NAME": "x"})
    assert error.reason is Reason.CONFIG_CONFLICT
    assert "DILOCO_CYLINDERS" in error.message
    assert "DILOCO_NAME" not in error.message


def test_settings_that_are_no_secret_load_again_from_their_own_toml(tmp_path):
    loaded = load(flags={"owner": 'a "b"\n\\ \x7fü', "turbo": True, "password": "hunter2"})
    text = loaded.to_toml()
    assert "hunter2" not in text
    again = load(text, tmp_path=tmp_path)
    assert again.value == dataclasses.replace(loaded.value, password=None)


@given(
    name=st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    cylinders=st.integers(1, 2**62),
    power=st.floats(allow_nan=False),
    turbo=st.booleans(),
    fuels=st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"])), max_size=3),
)
def test_every_value_survives_the_way_through_toml(name, cylinders, power, turbo, fuels):
    flags = {
        "name": name,
        "cylinders": cylinders,
        "power": power,
        "turbo": turbo,
        "fuels": tuple(fuels),
    }
    written = load(flags=flags)
    read = tomllib.loads(written.to_toml())["engine"]
    assert read["name"] == name
    assert read["cylinders"] == cylinders
    assert read["power"] == power
    assert read["turbo"] == turbo
    assert read["fuels"] == fuels


def test_not_a_number_is_written_as_toml():
    assert math.isnan(tomllib.loads(load(flags={"power": math.nan}).to_toml())["engine"]["power"])


def test_the_settings_of_a_run_load_from_their_own_toml(tmp_path):
    flags = {"quorum": 2, "grace": False, "trainer_json": '{"a": 1}', "push_floor_s": 2}
    loaded = load(flags=flags, cls=RunSettings, section="run")
    again = load(loaded.to_toml(), tmp_path=tmp_path, cls=RunSettings, section="run")
    assert again.value == loaded.value
    assert again.value.trainer_json == '{"a": 1}'
