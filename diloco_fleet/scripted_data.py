"""What goes into a scripted fleet and what comes out: schedule and result, as plain data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from decoupled_diloco.errors import Reason, UsageError
from learner_client import Learner
from learner_client.checkpoint import saved_state_from
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.engine import Engine
from synchronizer_server.ledger import Ledger
from synchronizer_server.merge.fragment_state import vector_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A new process takes part under this learner's id: a new incarnation, a fresh optimizer."""

    learner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A learner takes one inner step."""

    learner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """A learner says goodbye."""

    learner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A learner's process is gone, without a word."""

    learner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """Virtual time passes, seconds."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSynchronizer:
    """The synchronizer ends; its store stays.

    Attributes:
        drain: True where it finishes the rounds in flight first (SIGTERM), else it is killed.
    """

    drain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSynchronizer:
    """A synchronizer starts on the store of the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """Asks for a snapshot of the whole fleet; the next round committed is its cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoBack:
    """With no synchronizer there: the newest snapshot becomes the state of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A new process goes on from this learner's part of the newest snapshot."""

    learner: int


Action = (
    Join | Step | Leave | Kill | Advance | StopSynchronizer | StartSynchronizer
    | TakeSnapshot | GoBack | Resume
)  # fmt: skip

_KINDS: Final[dict[str, type[Action]]] = {
    "join": Join,
    "step": Step,
    "leave": Leave,
    "kill": Kill,
    "advance": Advance,
    "stop_synchronizer": StopSynchronizer,
    "start_synchronizer": StartSynchronizer,
    "take_snapshot": TakeSnapshot,
    "go_back": GoBack,
    "resume": Resume,
}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}
_MAX_LEARNERS: Final = 10_000
_MAX_SECONDS: Final = 1e6


def schedule_to_lines(schedule: Iterable[Action]) -> str:
    """Writes a schedule as JSON lines, one action each; floats keep every bit."""
    lines = ({"action": _NAMES[type(action)], **dataclasses.asdict(action)} for action in schedule)
    return "".join(json.dumps(line) + "\n" for line in lines)


def schedule_from_lines(text: str) -> tuple[Action, ...]:
    """Reads what ``schedule_to_lines`` wrote; empty lines are skipped.

    Raises:
        UsageError: CONFIG_INVALID, with the number of the line.
    """
    numbered = enumerate(text.splitlines(), start=1)
    return tuple(_action(line, number) for number, line in numbered if line.strip())


def _action(line: str, number: int) -> Action:
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _invalid(number, f"is no JSON ({error})") from error
    name = fields.pop("action", None) if isinstance(fields, dict) else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise _invalid(number, f"names no action; one of {', '.join(_KINDS)}")
    known = {field.name for field in dataclasses.fields(kind)}
    if set(fields) != known:
        raise _invalid(number, f"{name} takes {', '.join(sorted(known)) or 'nothing more'}")
    for key, value in fields.items():
        if not _is_valid(key, value):
            raise _invalid(number, f"{key} cannot be {value!r:.40}")
    return kind(**fields)


def _is_valid(key: str, value: object) -> bool:
    if key == "learner":
        return type(value) is int and 0 <= value < _MAX_LEARNERS
    if key == "drain":
        return type(value) is bool
    return (
        type(value) in {int, float} and math.isfinite(value) and 0 <= value <= _MAX_SECONDS  # type: ignore[operator, arg-type]
    )


def _invalid(number: int, why: str) -> UsageError:
    return UsageError(Reason.CONFIG_INVALID, f"schedule, line {number}: {why}", line=number)


def steady_schedule(
    num_learners: int, num_ticks: int, *, tick_s: float = 1.0, every: Sequence[int] | None = None
) -> tuple[Action, ...]:
    """All learners join, then step tick by tick.

    Args:
        num_learners: how many.
        num_ticks: how many ticks.
        tick_s: virtual seconds between two ticks.
        every: per learner, the ticks that one of its inner steps takes; 1 by default.
    """
    every = every or [1] * num_learners
    actions: list[Action] = [Join(learner=i) for i in range(num_learners)]
    for tick in range(1, num_ticks + 1):
        actions += [Step(learner=i) for i in range(num_learners) if tick % every[i] == 0]
        actions.append(Advance(seconds=tick_s))
    return tuple(actions)


def rough_schedule(
    seed: int, num_learners: int, num_ticks: int, *, fault_rate: float = 0.1
) -> tuple[Action, ...]:
    """A schedule of uneven speeds, deaths, returns, goodbyes and restarts; the same for a seed.

    One learner at least is always there, and at the end the synchronizer is.

    Args:
        seed: decides everything.
        num_learners: how many.
        num_ticks: how many ticks of about one virtual second.
        fault_rate: probability of a fault per tick.
    """
    return tuple(_rough(random.Random(seed), num_learners, num_ticks, fault_rate))


def _rough(
    rng: random.Random, num_learners: int, num_ticks: int, fault_rate: float
) -> Iterator[Action]:
    alive = list(range(num_learners))
    speeds = [rng.choice((0.5, 0.8, 1.0, 1.0)) for _ in range(num_learners)]
    is_up = True
    yield from (Join(learner=i) for i in alive)
    for _ in range(num_ticks):
        steps = [i for i in alive if rng.random() < speeds[i]]
        rng.shuffle(steps)
        for learner in steps:
            yield Step(learner=learner)
            if rng.random() < 0.5:
                yield Advance(seconds=rng.uniform(0.0, 0.3))
        yield Advance(seconds=rng.uniform(0.3, 1.2))
        if not is_up:
            if rng.random() < 0.4:
                is_up = True
                yield StartSynchronizer()
            continue
        away = [i for i in range(num_learners) if i not in alive]
        if away and rng.random() < 0.3:
            alive.append(away[0])
            yield Join(learner=away[0])
        elif rng.random() < fault_rate:
            if rng.random() < 0.4:
                is_up = False
                yield StopSynchronizer(drain=rng.random() < 0.5)
            elif len(alive) > 1:
                gone = alive.pop(rng.randrange(len(alive)))
                yield Kill(learner=gone) if rng.random() < 0.8 else Leave(learner=gone)
    if not is_up:
        yield StartSynchronizer()


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerResult:
    """One life of a learner as it was at its end.

    Attributes:
        learner_id: its id.
        incarnation: ``term.number``.
        is_present: True where the schedule ended with it there.
        local_step: inner steps over all lives of this id.
        model_sha256: over its parameters, in order.
        published_sha256: per fragment, over the published copy that it applied last.
        pushes: answers to its pushes, by word.
        losses: training loss of every inner step of this life, nats per token.
        changes: every change of its state: virtual time, state, mode, reason.
    """

    learner_id: str
    incarnation: str
    is_present: bool
    local_step: int
    model_sha256: str
    published_sha256: tuple[str, ...]
    pushes: dict[str, int]
    losses: tuple[float, ...]
    changes: tuple[str, ...]

    @classmethod
    def read(
        cls,
        learner: Learner,
        model: nn.Module,
        *,
        learner_id: str,
        is_present: bool,
        losses: tuple[float, ...],
        changes: tuple[str, ...],
    ) -> LearnerResult:
        """Reads it off a learner between two steps."""
        published = saved_state_from(learner.state_dict()).published
        return cls(
            learner_id=learner_id,
            incarnation=str(learner.incarnation),
            is_present=is_present,
            local_step=learner.local_step,
            model_sha256=_sha256(parameter.detach() for parameter in model.parameters()),
            published_sha256=tuple(
                vector_digest(copy).hex() for _, (_, copy) in sorted(published.items())
            ),
            pushes=dict(sorted(learner.status.pushes.items())),
            losses=losses,
            changes=changes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """One persisted round; contributions in the order of accumulation.

    Attributes:
        term: term of leadership.
        global_step: t.
        fragment: the fragment merged.
        contributors: learner ids.
        weights: their weights, tokens^2 per step.
        num_tokens: their tokens.
        num_steps: their inner steps.
        dropped: reason by learner id.
        result_sha256: digest of the published copy that resulted.
    """

    term: int
    global_step: int
    fragment: int
    contributors: tuple[str, ...]
    weights: tuple[float, ...]
    num_tokens: tuple[int, ...]
    num_steps: tuple[int, ...]
    dropped: dict[str, str]
    result_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """Everything that two runs of one schedule must agree on, bit for bit.

    Attributes:
        versions: per fragment, ``term.global_step`` of the published copy.
        published_sha256: per fragment, over the published copy.
        learners: every life of every learner, those that ended first.
        rounds: the lineage.
        participation: contributors over live learners.
        measured_h: inner steps between two merges of one fragment, mean; 0 before any.
        virtual_s: virtual seconds that passed.
    """

    versions: tuple[str, ...]
    published_sha256: tuple[str, ...]
    learners: tuple[LearnerResult, ...]
    rounds: tuple[RoundResult, ...]
    participation: float
    measured_h: float
    virtual_s: float

    @property
    def sha256(self) -> str:
        """SHA-256 over all of it, hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """All of it as one JSON object; floats keep every bit."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def collect(
    records: Iterable[RoundRecord],
    learners: Iterable[LearnerResult],
    ledgers: Sequence[Ledger],
    engine: Engine,
) -> FleetResult:
    """Puts the result together.

    Args:
        records: every record of the run, in order.
        learners: every life of every learner.
        ledgers: one per life of the synchronizer.
        engine: the synchronizer's last life.
    """
    num_live = sum(x.num_live for x in ledgers)
    num_measured = sum(x.measured_h_rounds for x in ledgers)
    versions = engine.updates.versions()
    return FleetResult(
        versions=tuple(f"{v.term}.{v.global_step}" for v in versions),
        published_sha256=tuple(
            vector_digest(engine.updates.published(p)).hex() for p in range(len(versions))
        ),
        learners=tuple(learners),
        rounds=tuple(_round(x, x.fragment) for x in records if x.fragment is not None),
        participation=sum(x.num_contributions for x in ledgers) / num_live if num_live else 0.0,
        measured_h=sum(x.measured_h_sum for x in ledgers) / num_measured if num_measured else 0.0,
        virtual_s=engine.parts.clock(),
    )


def _round(record: RoundRecord, fragment: int) -> RoundResult:
    given = record.contributions
    return RoundResult(
        term=record.term,
        global_step=record.global_step,
        fragment=fragment,
        contributors=tuple(x.learner_id for x in given),
        weights=tuple(x.weight for x in given),
        num_tokens=tuple(x.num_tokens for x in given),
        num_steps=tuple(x.num_steps for x in given),
        dropped={x.learner_id: x.reason for x in record.dropped},
        result_sha256=record.versions[fragment].digest.hex(),
    )


def _sha256(tensors: Iterable[torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.contiguous().numpy().data.cast("B"))
    return whole.hexdigest()
