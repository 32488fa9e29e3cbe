"""What the supervisor records: lines in ``metrics/fleet.jsonl``, and sentences for people."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from decoupled_diloco.journal import Journal


class FleetJournal:
    """Writes what happens to the fleet, and says it.

    Args:
        path: the JSONL file; appended to.
        say: takes a sentence for people.
        clock: unix time.
    """

    def __init__(
        self, path: Path, say: Callable[[str], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._journal = Journal(path, clock)
        self._say = say

    def record(self, kind: str, sentence: str = "", **values: object) -> None:
        """Records one event; a full disk stops nothing else.

        Args:
            kind: stable word for what happened.
            sentence: the same for people; empty for what need not be said.
            **values: facts, as JSON values.
        """
        if sentence:
            self._say(sentence)
        self._journal.write(kind, **values)

    def close(self) -> None:
        """Closes the file."""
        self._journal.close()

    def warn(self, sentence: str) -> None:
        """Says something that is not recorded."""
        self._say(sentence)
