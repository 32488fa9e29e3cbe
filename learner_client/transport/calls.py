"""Counts network calls by the thread that makes them: a training thread shall make none."""

from __future__ import annotations

import threading
from collections import Counter

_CALLS: Counter[int] = Counter()


def count_call() -> None:
    """Counts one call of the calling thread."""
    _CALLS[threading.get_ident()] += 1


def num_calls(thread: int | None = None) -> int:
    """Returns the network calls of this process so far.

    Args:
        thread: identity of a thread, to count only its calls.
    """
    return _CALLS.total() if thread is None else _CALLS[thread]
