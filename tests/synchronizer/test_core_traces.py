"""Golden traces: whole scenarios as text, reviewed as a diff.

``DILOCO_REWRITE_TRACES=1 pytest tests/synchronizer/test_core_traces.py`` rewrites the expectations.
A trace is a list of commands (``> ...``), each followed by what the core does, with the time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from core_script import ACTIONS, Script, settings, words

from decoupled_diloco.versions import Incarnation
from synchronizer_server.core import events as ev

REWRITE = bool(os.environ.get("DILOCO_REWRITE_TRACES"))  # read before the tests' own environment
TRACES = sorted((Path(__file__).parent / "traces").glob("*.txt"))


def value(text: str) -> object:
    if text in {"true", "false"}:
        return text == "true"
    return float(text) if "." in text else int(text)


def push(s: Script, name: str, *how: str) -> None:
    """``push a [t=7] [base=3] [tokens=64] [life=1.1] [term=1]``."""
    given: dict[str, object] = dict(x.split("=") for x in how)  # type: ignore[misc]
    for key, text in given.items():
        number = str(text)
        given[key] = Incarnation(*map(int, number.split("."))) if key == "life" else int(number)
    s.push(name, **given)


def steps(s: Script, count: str, *pace: str) -> None:
    """``steps 40 a b=2 c=20``: 0.1 s each; b reports every second time, c every twentieth."""
    every = {x.partition("=")[0]: int(x.partition("=")[2] or 1) for x in pace}
    for k in range(1, int(count) + 1):
        s.heard(*every)
        for name, n in every.items():
            if k % n == 0:
                s.report(name)
        s.advance(0.1)


COMMANDS: dict[str, Callable[..., object]] = {
    "up": lambda s, *names: s.up(*names),
    "join": lambda s, name: s.join(name),
    "open": lambda s, name: s.open(name),
    "close": lambda s, name: s.close(name),
    "leave": lambda s, name: s.leave(name),
    "seed": lambda s, name: s.seed(name),
    "warm": lambda s, *names: s.warm(*names),
    "report": lambda s, *names: s.report(*names),
    "heard": lambda s, *names: s.heard(*names),
    "advance": lambda s, seconds: s.advance(float(seconds)),
    "push": push,
    "push-open": lambda s, name: s.push_open(name),
    "stage": lambda s, name: s.stage(name),
    "decline": lambda s, name, t: s.decline(name, int(t)),
    "merged": lambda s, t: s.merged(int(t)),
    "persisted": lambda s, t: s.persisted(int(t)),
    "persist-failed": lambda s, t, after: s.persist_failed(int(t), float(after)),
    "quorum": lambda s, k: s.feed(ev.QuorumSet(quorum=int(k))),
    "drain": lambda s: s.feed(ev.DrainStarted()),
    "auto": lambda s, *what: s.auto.update(what or ACTIONS),
    "mute": lambda s, *names: s.mute.update(names),
    "unmute": lambda s, *names: s.mute.difference_update(names),
    "steps": steps,
}


def summary(s: Script) -> str:
    """``count``: how many rounds each learner is in."""
    counts: dict[str, int] = {}
    rounds = [e.summary for _, e in s.log if hasattr(e, "sync_s")]
    for r in rounds:
        for c in r.contributions:
            counts[c.learner_id] = counts.get(c.learner_id, 0) + 1
    by_name = ", ".join(f"{name} in {n}" for name, n in sorted(counts.items()))
    return f"{len(rounds)} rounds published: {by_name}"


def replay(text: str) -> str:
    """Runs the commands of a trace; returns it with what the core does."""
    script: Script | None = None
    out: list[str] = []
    silent = False
    for line in text.splitlines():
        if not line.startswith("> "):
            if not line.startswith("  "):
                out.append(line)
            continue
        out.append(line)
        command, *arguments = line[2:].split()
        if command == "settings":
            pairs = (x.split("=") for x in arguments)
            script = Script(settings(**{key: value(text) for key, text in pairs}))
            continue
        assert script is not None, "a trace begins with its settings"
        seen = len(script.log)
        if command == "waits":
            out.append("  " + (script.details() or "nothing waits"))
        elif command == "count":
            out.append("  " + summary(script))
        elif command == "quiet":
            silent = arguments == ["on"]
        else:
            COMMANDS[command](script, *arguments)
        new = [] if silent else script.log[seen:]
        out += [f"  {now:.3f} {words(effect)}" for now, effect in new]
    return "\n".join(out) + "\n"


def test_there_are_traces():
    assert len(TRACES) >= 6


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_trace(path):
    expected = path.read_text()
    actual = replay(expected)
    if REWRITE:
        path.write_text(actual)
    else:
        assert actual == expected
