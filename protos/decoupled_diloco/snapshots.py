"""How snapshots and their parts are named: the one thing that all who write parts agree on."""

from __future__ import annotations

import hashlib
import re
import urllib.parse
from dataclasses import dataclass
from typing import Final, Self

from decoupled_diloco.errors import Reason, UsageError

MANIFEST: Final = "manifest.json"
"""The file that makes a snapshot complete; written last."""

_MAX_NAME: Final = 128
_NAME: Final = re.compile(r"(\d{1,18})\.(\d{1,18})")


@dataclass(frozen=True, slots=True, order=True)
class SnapshotName:
    """Names a snapshot of the whole fleet by its cut.

    The term is part of it: after a resume from an earlier snapshot the same global step is
    reached again, on another lineage.

    Attributes:
        term: term of leadership in which the cut was committed.
        global_step: the cut, S: the last global step that is part of the snapshot.
    """

    term: int
    global_step: int

    def __str__(self) -> str:
        return f"{self.term}.{self.global_step}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads what ``str`` wrote.

        Raises:
            UsageError: CONFIG_INVALID.
        """
        match = _NAME.fullmatch(text)
        if match is None or str(name := cls(int(match[1]), int(match[2]))) != text:
            raise UsageError(
                Reason.CONFIG_INVALID,
                f"{text[:40]!r} names no snapshot; names are TERM.GLOBAL_STEP, such as 1.200",
            )
        return name


def part_name(learner_id: str) -> str:
    """File name of a learner's part, whatever characters its id has, and however many."""
    name = urllib.parse.quote(learner_id, safe="")
    if len(name) > _MAX_NAME:
        name = f"{name[:_MAX_NAME]}-{hashlib.sha256(learner_id.encode()).hexdigest()}"
    return name + ".safetensors"
