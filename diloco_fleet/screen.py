"""Where the live view goes: a table that is drawn over, or a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol

from rich.console import Console
from rich.live import Live

from diloco_fleet.view import Scene, plain_line, render

TABLE_INTERVAL_S: Final = 0.5
LINE_INTERVAL_S: Final = 10.0


class Screen(Protocol):
    """Shows scenes and sentences."""

    def __enter__(self) -> Screen: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def say(self, sentence: str) -> None:
        """Shows a sentence that stays."""

    def tick(self, scene: Callable[[], Scene]) -> None:
        """Shows the scene if it is time to; never waits."""


class TableScreen:
    """A table at the bottom of a terminal; sentences scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._due = 0.0

    def __enter__(self) -> TableScreen:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def say(self, sentence: str) -> None:
        """Shows a sentence above the table."""
        self._console.print(sentence, markup=False, highlight=False)

    def tick(self, scene: Callable[[], Scene]) -> None:
        """Redraws the table about twice a second."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + TABLE_INTERVAL_S
            self._live.update(render(scene()), refresh=True)


class LineScreen:
    """Plain lines with the time in front; when nobody reads them any more, the fleet goes on."""

    def __init__(self, write: Callable[[str], None], interval_s: float = LINE_INTERVAL_S) -> None:
        self._write = write
        self._interval_s = interval_s
        self._due = 0.0

    def __enter__(self) -> LineScreen:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return

    def say(self, sentence: str) -> None:
        """Writes a sentence."""
        try:
            self._write(f"{time.strftime('%H:%M:%S')} {sentence}")
        except BrokenPipeError:
            self._write = lambda _: None

    def tick(self, scene: Callable[[], Scene]) -> None:
        """Writes a line when the interval is over."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._interval_s
            self.say(plain_line(scene()))


def open_screen(console: Console, write: Callable[[str], None], *, plain: bool = False) -> Screen:
    """Returns a table where the console is a terminal that can show one, lines elsewhere."""
    if console.is_terminal and not console.is_dumb_terminal and not plain:
        return TableScreen(console)
    return LineScreen(write)
