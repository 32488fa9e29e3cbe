"""What the supervisor records: lines in ``metrics/fleet.jsonl``, and sentences for people."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path


class Journal:
    """Writes what happens to the fleet, and says it.

    Args:
        path: the JSONL file; appended to.
        say: takes a sentence for people.
        clock: unix time.
    """

    def __init__(
        self, path: Path, say: Callable[[str], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._say = say
        self._clock = clock
        self._broken = False

    def record(self, kind: str, sentence: str = "", **values: object) -> None:
        """Records one event; a full disk is said once and stops nothing else.

        Args:
            kind: stable word for what happened.
            sentence: the same for people; empty for what need not be said.
            **values: facts, as JSON values.
        """
        if sentence:
            self._say(sentence)
        line = json.dumps({"kind": kind, "time": self._clock(), **values}) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            if not self._broken:
                self._broken = True
                self._say(f"{self._path} cannot be written ({error.strerror}); going on without it")

    def warn(self, sentence: str) -> None:
        """Says something that is not recorded."""
        self._say(sentence)
