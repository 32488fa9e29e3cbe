"""Events of the journal in words: what they happened to, and what happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

Fields = Mapping[str, Any]
Told = tuple[str, str]
"""Subject and text."""


def sentence(kind: str, fields: Fields) -> Told | None:
    """Returns an event in words; None for one that is no news, as most rounds are."""
    say = _SENTENCES.get(kind)
    return say(fields) if say is not None else None


def _because(text: str, reason: object) -> str:
    return f"{text}: {reason}" if reason else text


def _start(fields: Fields) -> Told:
    return "synchronizer", f"term {fields['term']} begins at global step {fields['global_step']}"


def _round(fields: Fields) -> Told | None:
    if "rolled_back" not in fields:
        return None
    subject = f"fragment {fields['fragment']}"
    return subject, f"was put back in round {fields['global_step']}: {fields['rolled_back']}"


def _wait(fields: Fields) -> Told:
    if not fields["reason"]:
        return fields["subject"], fields["detail"]
    return fields["subject"], _because(f"waits, {fields['reason']}", fields["detail"])


def _learner(fields: Fields) -> Told:
    state, reason = fields["state"], fields["reason"]
    return fields["learner_id"], _because(f"is {state}", "" if reason == state else reason)


def _quarantine(fields: Fields) -> Told:
    if not fields["reason"]:
        return fields["learner_id"], "is asked again"
    text = f"is left out for {fields['seconds']:.0f} s"
    return fields["learner_id"], _because(text, fields["reason"])


def _snapshot(fields: Fields) -> Told:
    out = ", ".join(sorted(fields["left_out"]))
    return f"snapshot {fields['snapshot']}", "is complete" + (f", without {out}" if out else "")


def _persist_failed(fields: Fields) -> Told:
    what = f"round {fields['global_step']}" if fields["global_step"] else "the seed"
    return "store", f"{what} is not persisted, merging waits: {fields['reason']}"


_SENTENCES: Final[Mapping[str, Callable[[Fields], Told | None]]] = {
    "start": _start,
    "round": _round,
    "wait": _wait,
    "learner": _learner,
    "quarantine": _quarantine,
    "snapshot": _snapshot,
    "persist_failed": _persist_failed,
    "seeded": lambda _: ("run", "is seeded"),
    "complete": lambda x: ("run", f"is complete at global step {x['global_step']}"),
    "drained": lambda x: ("run", f"is drained at global step {x['global_step']}"),
    "stop": lambda x: ("synchronizer", f"leads no longer, global step {x['global_step']}"),
    "store_lost": lambda x: ("store", f"lacks the run that {x['learner_id']} holds"),
    "quorum": lambda x: ("quorum", f"is {x['quorum']}, was {x['before']}"),
    "drain": lambda x: (x["learner_id"], _because("is asked to leave", x["reason"])),
    "recovery": lambda x: (x["learner_id"], f"asks {x['donor']} for its inner state"),
    "recovered": lambda x: (x["learner_id"], f"has the inner state of {x['donor']}"),
    "not_recovered": lambda x: (x["learner_id"], _because("got no inner state", x["reason"])),
    "snapshot_begun": lambda x: (f"snapshot {x['snapshot']}", "is being taken"),
    "snapshot_failed": lambda x: (f"snapshot {x['snapshot']}", _because("failed", x["reason"])),
}
