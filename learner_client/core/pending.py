"""Updates that wait for the next inner-step boundary."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class PendingUpdates(Generic[T]):
    """In order of arrival, and never more than one per fragment.

    An update overwrites its whole fragment, so a newer one makes an older one of the same fragment
    needless: it takes its place at the end. That bounds memory however long a step takes.
    """

    def __init__(self) -> None:
        self._items: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._items)

    def offer(self, fragment: int, item: T) -> None:
        """Adds an update of ``fragment``."""
        self._items.pop(fragment, None)
        self._items[fragment] = item

    def take(self) -> list[T]:
        """Takes all, in the order in which they are to be applied."""
        items = list(self._items.values())
        self._items.clear()
        return items
