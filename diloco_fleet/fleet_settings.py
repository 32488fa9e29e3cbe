"""Settings of a local fleet: sections ``[run]``, ``[trainer]``, ``[fleet]`` of one TOML file.

``[run]`` is the synchronizer's, ``[trainer]`` what it serves to the trainers, ``[fleet]`` what is
true of this machine alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from decoupled_diloco.config import ENV_PREFIX, Loaded, Origin, load_settings, read_section
from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.setting_fields import settings_of
from decoupled_diloco.settings import RunSettings
from diloco_fleet.process import Restart
from learner_client.inner_work import RECOVER_MODES
from learner_client.train.settings import TrainSettings


def _setting(default: Any, help_text: str, *, secret: bool = False) -> Any:  # noqa: ANN401 - as field
    return field(default=default, metadata={"help": help_text, "secret": secret})


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """What is true of this machine's fleet alone.

    Raises:
        UsageError: CONFIG_INVALID, naming the setting.
    """

    data: tuple[str, ...] = _setting(
        (),
        "text files, folders, glob patterns or .jsonl to train on; Python's documentation if none",
    )
    pace: float = _setting(
        0.0, "shortest time of an inner step in seconds, so that few cores do not distort figures"
    )
    slow_learner: tuple[str, ...] = _setting(
        (), "I:FACTOR lets learner I run at that share of its speed, as in 2:0.5"
    )
    restart: str = _setting(
        Restart.ALWAYS.value, "always, on-failure or never: which ends of a process start it again"
    )
    max_restarts: int = _setting(
        10, "give up on a process after so many short lives in a row; too low loses it to bad luck"
    )
    restart_wait_s: float = _setting(
        15.0, "longest wait before a process that keeps dying is started again; waits double to it"
    )
    recover: str = _setting(
        "peer",
        "what a learner that is started again has beside the parameters: params (nothing), peer "
        "(another one's optimizer state) or checkpoint (its own)",
    )
    checkpoint_every_s: float = _setting(
        60.0, "seconds between two checkpoints of a learner, with recover = checkpoint"
    )
    redis: str | None = _setting(
        None,
        "redis://HOST:PORT for membership and lease; if none, in memory, or with a standby a Redis "
        "of the fleet's own",
        secret=True,
    )
    standby: bool = _setting(
        False, "run a second synchronizer that takes over; needs --redis, or redis-server on PATH"
    )
    device: str = _setting("auto", "auto, cpu, cuda (learner i uses cuda:(i mod n)) or cuda:0")
    evaluate_every: int = _setting(
        50, "global steps between two evaluations; often costs a core, seldom draws a coarse curve"
    )
    port: int = _setting(0, "port of the (first) synchronizer on 127.0.0.1; 0 takes a free one")
    drain_s: float = _setting(30.0, "seconds from asking a process to stop to killing it")
    finish_s: float = _setting(
        300.0, "seconds that the last learners and the evaluator get after the first has finished"
    )

    def __post_init__(self) -> None:
        if self.restart not in tuple(Restart):
            raise UsageError(
                Reason.CONFIG_INVALID,
                f"restart is {self.restart!r}; one of {', '.join(Restart)}",
            )
        if self.recover not in RECOVER_MODES:
            raise UsageError(
                Reason.CONFIG_INVALID,
                f"recover is {self.recover!r}; one of {', '.join(RECOVER_MODES)}",
            )
        for name, low, high in (
            ("pace", 0.0, 3600.0),
            ("max_restarts", 0, 1_000_000),
            ("checkpoint_every_s", 0.0, 1e6),
            ("evaluate_every", 1, 1_000_000_000),
            ("port", 0, 65535),
            ("restart_wait_s", 0.1, 86400.0),
            ("drain_s", 0.1, 86400.0),
            ("finish_s", 0.1, 86400.0),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise UsageError(
                    Reason.CONFIG_INVALID, f"{name} is {value}; between {low} and {high}"
                )
        self.slow_factors()

    def slow_factors(self, num_learners: int | None = None) -> dict[int, float]:
        """Returns the share of its speed at which each slow learner runs, by index.

        Args:
            num_learners: planned learners, to check the indices against.

        Raises:
            UsageError: CONFIG_INVALID.
        """
        factors: dict[int, float] = {}
        for text in self.slow_learner:
            index_text, _, factor_text = text.partition(":")
            try:
                index, factor = int(index_text), float(factor_text)
            except ValueError:
                index, factor = -1, math.nan
            if index < 0 or not 0.0 < factor <= 1.0:
                raise UsageError(
                    Reason.CONFIG_INVALID,
                    f"slow_learner is {text!r}; give INDEX:FACTOR with a factor above 0 and at "
                    "most 1, as in 2:0.5 for half speed",
                )
            if num_learners is not None and index >= num_learners:
                raise UsageError(
                    Reason.CONFIG_INVALID,
                    f"slow_learner is {text!r} but the learners are 0 to {num_learners - 1}",
                )
            factors[index] = factor
        return factors


_NEVER_CHOSEN: Final = frozenset({"trainer.num_shards", "trainer.corpus_hash", "run.data_length"})
"""Settings that the file of a run holds and that follow from other ones."""

SECTIONS: Final[Mapping[str, type[Any]]] = MappingProxyType(
    {"run": RunSettings, "trainer": TrainSettings, "fleet": FleetSettings}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """All settings of a fleet and where each came from.

    Attributes:
        run: the synchronizer's.
        trainer: the trainers'.
        fleet: this machine's.
        notes: sentences on what follows from a setting that was given now.
    """

    run: Loaded[RunSettings]
    trainer: Loaded[TrainSettings]
    fleet: Loaded[FleetSettings]
    notes: tuple[str, ...] = ()

    def describe(self) -> list[str]:
        """Returns one line per setting that was given now or is not the default, and the notes."""
        parts = (self.run, self.trainer, self.fleet)
        return [*(line for part in parts for line in _chosen(part)), *self.notes]

    def to_toml(self) -> str:
        """Returns a TOML file from which the same settings load again."""
        return "\n".join(part.to_toml() for part in (self.run, self.trainer, self.fleet))

    def with_corpus(self, corpus_hash: str, num_windows: int) -> Resolved:
        """Returns the settings with the hash of the run's corpus and, leased, its length."""
        trainer = dataclasses.replace(self.trainer.value, corpus_hash=corpus_hash)
        run = self.run.value
        if run.data_mode == "leases":
            run = dataclasses.replace(run, data_length=num_windows)
        return dataclasses.replace(
            self,
            run=dataclasses.replace(self.run, value=run),
            trainer=dataclasses.replace(self.trainer, value=trainer),
        )


def resolve(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    file: Path | None,
    *,
    default_run_id: str,
) -> Resolved:
    """Resolves all three sections; what one section implies for another is filled in.

    The trainer's shards are the planned learners, its schedule is as long as the run, and its
    warm-up is at most a tenth of that, unless these are given. A file that gives run and schedule
    the same length does not give the schedule a length of its own: it follows a flag, too.

    Args:
        flags: parameters of the command line by name.
        environ: the environment.
        file: TOML file, or None.
        default_run_id: id of the run where none is given.

    Raises:
        UsageError: CONFIG_UNKNOWN_KEY, CONFIG_INVALID, CONFIG_CONFLICT, QUORUM_ABOVE_LEARNERS.
    """
    # Not at the top: it imports torch, which takes seconds.
    from decoupled_diloco.codecs import check_codecs

    defaults = TrainSettings()
    run = _load(
        RunSettings,
        "run",
        (flags, environ, file),
        {"run_id": default_run_id, "total_global_steps": defaults.total_global_steps},
    )
    check_codecs(run.value)
    if run.value.trainer_json:
        raise UsageError(
            Reason.CONFIG_CONFLICT,
            "trainer_json cannot be given here; put the trainer's settings into section [trainer]",
        )
    trainer, notes = _load_trainer(run.value, flags, environ, file)
    if trainer.value.num_shards != run.value.num_learners:
        raise UsageError(
            Reason.CONFIG_CONFLICT,
            f"num_shards is {trainer.value.num_shards} but {run.value.num_learners} learners are "
            "planned, and each has a shard of its own; leave num_shards out",
        )
    fleet = _load(FleetSettings, "fleet", (flags, environ, file), {})
    fleet.value.slow_factors(run.value.num_learners)
    return Resolved(run=run, trainer=trainer, fleet=fleet, notes=notes)


def _load_trainer(
    run: RunSettings, flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None
) -> tuple[Loaded[TrainSettings], tuple[str, ...]]:
    """Loads the trainer's section for a run; the second value are its notes for people."""
    num_steps = run.total_global_steps or TrainSettings().total_global_steps
    followed = _followed(file, run)
    trainer = _load(
        TrainSettings,
        "trainer",
        (_without(flags, "total_global_steps"), _without_variable(environ), file),
        {
            "total_global_steps": num_steps,
            "warmup_steps": _warmup(num_steps),
            "num_shards": run.num_learners,
        },
        followed=followed,
    )
    note = f"the schedule of the learning rate follows: {num_steps} global steps"
    return trainer, (note,) if followed else ()


def _warmup(num_steps: int) -> int:
    """The warm-up of a schedule where none is given."""
    return min(TrainSettings().warmup_steps, num_steps // 10)


def _followed(file: Path | None, run: RunSettings) -> frozenset[str]:
    """The trainer's settings in the file that follow the length of the run, which is another now.

    The schedule does where the file gives it the length of the run; the warm-up does where it is
    what follows from that length and the new schedule has no room for it.
    """
    if file is None or not run.total_global_steps:
        return frozenset()
    in_file = {
        section: read_section(file, section, SECTIONS[section], SECTIONS)
        for section in ("run", "trainer")
    }
    before = in_file["run"].get("total_global_steps")
    if (
        not isinstance(before, int)
        or before == run.total_global_steps
        or in_file["trainer"].get("total_global_steps") != before
    ):
        return frozenset()
    warmup = in_file["trainer"].get("warmup_steps")
    if warmup == _warmup(before) and run.total_global_steps <= _warmup(before):
        return frozenset({"total_global_steps", "warmup_steps"})
    return frozenset({"total_global_steps"})


def _load(
    cls: type[Any],
    section: str,
    sources: tuple[Mapping[str, object], Mapping[str, str], Path | None],
    implied: Mapping[str, object],
    followed: frozenset[str] = frozenset(),
) -> Loaded[Any]:
    """Loads one section; implied values stand in for defaults, and for some of the file's."""
    flags, environ, file = sources
    others = {name: other for name, other in SECTIONS.items() if name != section}
    in_file = read_section(file, section, cls, others) if file else {}
    missing = {
        name: value
        for name, value in implied.items()
        if flags.get(name) is None
        and ENV_PREFIX + name.upper() not in environ
        and (name not in in_file or name in followed)
    }
    loaded = load_settings(
        cls,
        flags={**flags, **missing},
        environ=environ,
        file=file,
        section=section,
        others=others,
    )
    origins: dict[str, Origin] = {**loaded.origins, **dict.fromkeys(missing, "default")}
    return dataclasses.replace(loaded, origins=MappingProxyType(origins))


def _chosen(part: Loaded[Any]) -> list[str]:
    """The lines of ``describe`` without what nobody chose: defaults that a file merely repeats.

    The file of a resumed run holds every setting.
    """
    defaults = {setting.name: setting.default for setting in settings_of(type(part.value))}
    repeated = {
        f"{part.section}.{name}"
        for name, origin in part.origins.items()
        if origin == "file" and getattr(part.value, name) == defaults[name]
    }
    hidden = repeated | _NEVER_CHOSEN
    return [line for line in part.describe() if line.partition(" = ")[0] not in hidden]


def _without(values: Mapping[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in values.items() if key != name}


def _without_variable(environ: Mapping[str, str]) -> dict[str, str]:
    """The length of the run is not by itself the length of the schedule."""
    variable = ENV_PREFIX + "TOTAL_GLOBAL_STEPS"
    return {key: value for key, value in environ.items() if key != variable}
