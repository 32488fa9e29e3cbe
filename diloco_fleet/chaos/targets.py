"""Whom a fault strikes: a name, a role, one at random, who leads, who follows.

=======================  ===================================================
``learner-1``            the process of that name
``random learner``       one of a role, chosen by the seed
``every learner``        all of a role
``the leader``           the synchronizer that leads then
``the follower``         a synchronizer that does not
``the donor``            the learner that gives its inner state to another one
=======================  ===================================================

Roles are ``learner`` and ``synchronizer``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from typing import Final

from decoupled_diloco.errors import Reason, UsageError
from diloco_fleet.metrics import is_synchronizer

LEARNER: Final = "learner"
LEADER: Final = "the leader"
FOLLOWER: Final = "the follower"
DONOR: Final = "the donor"
REDIS: Final = "redis"
REST: Final = "rest"
"""In a partition: everybody who is not in the other group."""

_ROLES: Final = (LEARNER, "synchronizer")
_HOWS: Final = ("random", "every")
_NAMED: Final = re.compile(r"(learner-\d+|synchronizer(-\d+)?|redis)")
_WORDS: Final = (
    LEADER, FOLLOWER, DONOR, REDIS, "learner-0", "synchronizer-0",
    *(f"{how} {role}" for how in _HOWS for role in _ROLES),
)  # fmt: skip


def check_target(target: str, where: str) -> None:
    """Refuses what names nobody in any fleet.

    Raises:
        UsageError: CONFIG_INVALID with the nearest words.
    """
    if target in _WORDS or _NAMED.fullmatch(target):
        return
    near = difflib.get_close_matches(target, _WORDS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(_WORDS)}"
    raise UsageError(Reason.CONFIG_INVALID, f"{where}: nobody is called {target!r}; {hint}")


def speaks_of_synchronizers(target: str) -> bool:
    """Whether a target can be nobody but a synchronizer."""
    role = target.rpartition(" ")[2]
    return target in {LEADER, FOLLOWER} or is_synchronizer(role)


def is_learner(name: str) -> bool:
    """Whether a process of this name is a learner."""
    return name.startswith(f"{LEARNER}-")


def check_exists(target: str, names: Collection[str], where: str) -> None:
    """Refuses a target that this fleet does not have.

    Raises:
        UsageError: TARGET_NOT_FOUND.
    """
    if target == FOLLOWER:
        found = sum(is_synchronizer(name) for name in names) > 1
    elif target == LEADER:
        found = any(is_synchronizer(name) for name in names)
    elif target == DONOR:
        found = sum(is_learner(name) for name in names) > 1
    else:
        found = bool(_of_role(target, names)) or target in names
    if not found:
        raise UsageError(
            Reason.TARGET_NOT_FOUND,
            f"{where}: this fleet has no {target}; it has {', '.join(sorted(names)) or 'nobody'}",
        )


def _of_role(target: str, names: Collection[str]) -> list[str]:
    """Everybody of the role that a target speaks of, in order; empty where it names one."""
    role = target.rpartition(" ")[2]
    if role == LEARNER:
        return sorted(filter(is_learner, names), key=_by_number)
    return sorted(filter(is_synchronizer, names)) if role == "synchronizer" else []


def _by_number(name: str) -> tuple[int, str]:
    number = name.rpartition("-")[2]
    return (int(number) if number.isdigit() else 0, name)


def resolve_target(
    target: str, names: Collection[str], leader: str | None, pick: float
) -> tuple[str, ...]:
    """Says who it is now; empty where it is nobody at the moment.

    Args:
        target: checked by `check_target`.
        names: processes that run.
        leader: name of who leads; None while nobody does.
        pick: from 0 to below 1, which of several is chosen.
    """
    if target in {LEADER, FOLLOWER}:
        if leader is None or leader not in names:
            return ()
        others = [name for name in sorted(names) if is_synchronizer(name) and name != leader]
        return (leader,) if target == LEADER else _one_of(others, pick)
    if target in names:
        return (target,)
    if target.startswith("every "):
        return tuple(_of_role(target, names))
    return _one_of(_of_role(target, names), pick) if target.startswith("random ") else ()


def resolve_groups(
    groups: Sequence[Sequence[str]], names: Collection[str], leader: str | None, pick: float
) -> tuple[tuple[str, ...], ...]:
    """Says who the groups of a fault are now, the rest left out; nobody is in two places.

    A group in which a target is nobody is empty: it would be less than what was planned.

    Args:
        groups: targets, each checked by `check_target`.
        names: see `resolve_target`.
        leader: see `resolve_target`.
        pick: see `resolve_target`.
    """
    found: list[dict[int, tuple[str, ...]]] = [{} for _ in groups]
    taken: set[str] = set()
    places = [(g, i) for g, group in enumerate(groups) for i, x in enumerate(group) if x != REST]
    # Chance chooses among those whom nobody names, and a role is who is left of it.
    for g, i in sorted(places, key=lambda place: _breadth(groups[place[0]][place[1]])):
        target = groups[g][i]
        free = set(names) - taken if _breadth(target) else names
        chosen = tuple(x for x in resolve_target(target, free, leader, pick) if x not in taken)
        found[g][i] = chosen
        taken.update(chosen)
    return tuple(
        tuple(name for i in sorted(members) for name in members[i]) if all(members.values()) else ()
        for members in found
    )


def _breadth(target: str) -> int:
    """How wide a target is: one process, one of several, all of them."""
    how = target.partition(" ")[0]
    return _HOWS.index(how) + 1 if how in _HOWS else 0


def _one_of(names: Sequence[str], pick: float) -> tuple[str, ...]:
    return (names[int(pick * len(names))],) if names else ()
