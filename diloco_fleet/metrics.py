"""Reads the metrics of a run: one JSONL file per process, as they were written.

A process that is killed leaves a torn last line, and the life after it appends behind that; a
torn piece is therefore tolerated where it ends the file and reported anywhere else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from diloco_fleet.data_ledger import RoundData, read_round_data

SYNCHRONIZER: Final = "synchronizer"
"""The only synchronizer of a fleet; with a standby, a dash and a number follow."""

EVALUATOR: Final = "evaluator"
FLEET: Final = "fleet"

_MAX_PROBLEMS_PER_FILE = 5
_TAIL_BYTES: Final = 4096


def is_synchronizer(process: str) -> bool:
    """Says whether a process of this name is a synchronizer."""
    return process == SYNCHRONIZER or process.startswith(SYNCHRONIZER + "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A version that a learner wrote into its model.

    Attributes:
        fragment: the fragment.
        term: term of the version.
        global_step: global step of the version; 0 for the seed.
        digest: digest of the published copy, hex.
    """

    fragment: int
    term: int
    global_step: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One inner step of a learner.

    Attributes:
        time: unix time at its end.
        global_step: last global step that the learner had applied.
        loss: training loss, nats per token; NaN where the user's loop reports none.
        num_tokens: tokens of the step.
        step_s: the whole iteration of the loop, seconds.
        overhead_s: of it, time inside ``learner.step``.
        life: counts the lives of the learner's process, from 0.
        applied: versions that were new in the model at its end.
    """

    time: float
    global_step: int
    loss: float
    num_tokens: int
    step_s: float
    overhead_s: float
    life: int
    applied: tuple[Applied, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One committed round.

    Attributes:
        time: unix time of the commit.
        global_step: its global step.
        fragment: its fragment.
        contributors: learners whose push was merged.
        live: learners that were live.
        tokens: tokens of the contributions, for this fragment.
        measured_h: inner steps since the last merge of the fragment, mean over contributors.
        bytes_up: bytes of outer gradients, all since the term began.
        bytes_down: bytes of updates, all since the term began.
        term: term in which it was committed; 0 where that was not written down.
        digest: digest of the published copy that it made, hex; empty where not written down.
        synchronizer: name of the process that committed it.
        data: leased data; None where shards are fixed.
    """

    time: float
    global_step: int
    fragment: int
    contributors: tuple[str, ...]
    live: tuple[str, ...]
    tokens: int
    measured_h: float | None
    bytes_up: int
    bytes_down: int
    term: int = 0
    digest: str = ""
    synchronizer: str = SYNCHRONIZER
    data: RoundData | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation of the published copy on held-out text.

    Attributes:
        time: unix time.
        global_step: of the copy.
        loss: nats per token.
    """

    time: float
    global_step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened once.

    Attributes:
        kind: what, such as ``start``, ``restart``, ``gone``.
        time: unix time.
        values: the rest of the line.
    """

    kind: str
    time: float
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """Everything that a run has written.

    Attributes:
        steps: inner steps of every learner, in the order of its file.
        rounds: committed rounds by term, those of one term in the order of the file.
        evaluations: in the order of the file.
        marks: of every process (and of the supervisor, ``fleet``), in the order of its file.
        problems: what could not be read, for people.
    """

    steps: Mapping[str, tuple[Step, ...]] = field(default_factory=dict)
    rounds: tuple[Round, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    marks: Mapping[str, tuple[Mark, ...]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def marks_of(self, process: str, kind: str) -> tuple[Mark, ...]:
        """Returns the marks of one kind that a process left."""
        return tuple(mark for mark in self.marks.get(process, ()) if mark.kind == kind)


def read_metrics(folder: Path) -> RunMetrics:
    """Reads every metrics file of a run.

    Raises:
        DilocoError: STORAGE_FAILED when a file cannot be read.
    """
    # Not at the top: learner_client imports torch, for which `diloco status` does not wait.
    from learner_client.files import storage_errors

    texts = {}
    for path in sorted(folder.glob("*.jsonl")):
        with storage_errors(path, "reading"):
            texts[path.stem] = path.read_text(encoding="utf-8", errors="replace")
    return parse_metrics(texts)


def last_evaluation(path: Path) -> Evaluation | None:
    """Returns the newest evaluation in a metrics file; None without any near its end."""
    evaluations = parse_metrics({EVALUATOR: _tail(path)}).evaluations
    return evaluations[-1] if evaluations else None


def last_round(folder: Path) -> Round | None:
    """Returns the newest committed round of the highest term in the metrics of a run.

    None without any near the end of the synchronizers' files.
    """
    paths = [path for path in folder.glob(f"{SYNCHRONIZER}*.jsonl") if is_synchronizer(path.stem)]
    rounds = parse_metrics({path.stem: _tail(path) for path in paths}).rounds
    return rounds[-1] if rounds else None


def last_outcome(folder: Path) -> str | None:
    """Returns how the newest session of a fleet ended; None where it runs, or was killed."""
    marks = parse_metrics({FLEET: _tail(folder / f"{FLEET}.jsonl")}).marks[FLEET]
    sessions = [mark for mark in marks if mark.kind in {"start", "end"}]
    if not sessions or sessions[-1].kind == "start":
        return None
    return str(sessions[-1].values.get("outcome"))


def _tail(path: Path) -> str:
    """The last whole lines of a file; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _TAIL_BYTES, 0))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return text.partition("\n")[2] if size > _TAIL_BYTES else text


def parse_metrics(texts: Mapping[str, str]) -> RunMetrics:
    """Parses metrics files.

    Args:
        texts: content of each file, by the name of the process that wrote it.
    """
    steps: dict[str, tuple[Step, ...]] = {}
    marks: dict[str, tuple[Mark, ...]] = {}
    rounds: list[Round] = []
    evaluations: list[Evaluation] = []
    problems: list[str] = []
    for process, text in texts.items():
        parser = _FileParser(process)
        for line in _lines(text):
            parser.add(*line)
        steps.update({process: tuple(parser.steps)} if parser.steps else {})
        marks[process] = tuple(parser.marks)
        rounds += parser.rounds
        evaluations += parser.evaluations
        problems += parser.summary()
    return RunMetrics(
        steps=steps,
        rounds=tuple(sorted(rounds, key=lambda entry: entry.term)),
        evaluations=tuple(evaluations),
        marks=marks,
        problems=tuple(problems),
    )


def _lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yields number, text and "may be torn" of every line that is not empty."""
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, line, number == len(lines)


class _FileParser:
    """Collects the records of one file."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.steps: list[Step] = []
        self.rounds: list[Round] = []
        self.evaluations: list[Evaluation] = []
        self.marks: list[Mark] = []
        self._problems: list[str] = []
        self._life = 0

    def add(self, number: int, line: str, may_be_torn: bool) -> None:
        try:
            self._record(json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            if not may_be_torn:
                self._problems.append(f"{self.process}.jsonl line {number} cannot be read")

    def _record(self, values: dict[str, Any]) -> None:
        kind = values["kind"]
        if kind == "step":
            self.steps.append(_step(values, self._life))
        elif kind == "round":
            self.rounds.append(_round(values, self.process))
        elif kind == "evaluation":
            self.evaluations.append(
                Evaluation(
                    time=_finite(values["time"]),
                    global_step=int(values["global_step"]),
                    loss=float(values["loss"]),
                )
            )
        else:
            rest = {key: value for key, value in values.items() if key not in {"kind", "time"}}
            self.marks.append(Mark(kind=str(kind), time=_finite(values["time"]), values=rest))
            self._life += kind == "start"

    def summary(self) -> list[str]:
        """The first problems of the file, and how many more there were."""
        shown = self._problems[:_MAX_PROBLEMS_PER_FILE]
        num_more = len(self._problems) - len(shown)
        return shown + ([f"{self.process}.jsonl: {num_more} more such lines"] if num_more else [])


def _step(values: dict[str, Any], life: int) -> Step:
    loss = values.get("loss")
    return Step(
        time=_finite(values["time"]),
        global_step=int(values["global_step"]),
        loss=math.nan if loss is None else float(loss),
        num_tokens=int(values["num_tokens"]),
        step_s=_finite(values["step_s"]),
        overhead_s=_finite(values["overhead_s"]),
        life=life,
        applied=tuple(
            Applied(fragment=int(p), term=int(term), global_step=int(t), digest=str(digest))
            for p, term, t, digest in values.get("applied", ())
        ),
    )


def _round(values: dict[str, Any], process: str) -> Round:
    measured_h = values.get("measured_h")
    return Round(
        time=_finite(values["time"]),
        global_step=int(values["global_step"]),
        fragment=int(values["fragment"]),
        contributors=tuple(str(name) for name in values["contributors"]),
        live=tuple(str(name) for name in values["live"]),
        tokens=int(values["tokens"]),
        measured_h=None if measured_h is None else _finite(measured_h),
        bytes_up=int(values["bytes_up"]),
        bytes_down=int(values["bytes_down"]),
        term=int(values.get("term", 0)),
        digest=str(values.get("digest", "")),
        synchronizer=process,
        data=read_round_data(values["data"]) if "data" in values else None,
    )


def _finite(value: float | str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number
