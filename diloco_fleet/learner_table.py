"""The learners of a fleet as a table that fits into a terminal."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from decoupled_diloco.v1 import admin_pb2

_STATE_STYLES: Final = {
    "live": "green", "expected": "yellow", "disconnected": "yellow", "gone": "red", "left": "dim",
    "drained": "dim",
}  # fmt: skip
_HAS_LEFT: Final = ("left", "drained")
_NUMBERS: Final = ("step", "loss", "tokens/s", "behind", "up", "down", "merged", "restarts")
_LEAST_FIRST: Final = ("down", "up", "tokens/s", "merged", "behind", "restarts", "loss", "step")
"""The order in which columns go where the terminal is too narrow for all of them."""
_UNITS: Final = ("B", "kB", "MB", "GB", "TB")
_UNBOUNDED: Final = 100_000


@dataclass(frozen=True, slots=True)
class LearnerTable:
    """Every learner with what it does; on a narrow terminal with fewer columns, none of them cut.

    Attributes:
        status: the synchronizer's answer.
        processes: state of every process as the supervisor sees it, with its restarts.
    """

    status: admin_pb2.GetStatusResponse
    processes: Mapping[str, tuple[str, int]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, leave = list(_NUMBERS), list(_LEAST_FIRST)
        if not any(restarts for _, restarts in self.processes.values()):
            leave.sort(key=lambda name: name != "restarts")  # nothing stands in it
        table = self._table(shown)
        wide = options.update(max_width=_UNBOUNDED)
        while leave and Measurement.get(console, wide, table).maximum > options.max_width:
            shown.remove(leave.pop(0))
            table = self._table(shown)
        yield table

    def _table(self, shown: Collection[str]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
        table.add_column("learner", overflow="fold")
        table.add_column("state", overflow="fold")
        for name in shown:
            table.add_column(name, justify="right", no_wrap=True)
        known = {learner.learner_id: learner for learner in self.status.learners}
        names = [*known, *(n for n in self.processes if n not in known and n.startswith("learner"))]
        for name in sorted(names, key=natural):
            state, restarts = self.processes.get(name, ("", 0))
            learner = known.get(name)
            if learner is None:
                table.add_row(name, Text(state or "starting", style="dim"))
                continue
            seen = "quarantine" if learner.quarantine else learner.state
            text = seen if state in ("", "running", "done", seen) else f"{seen}, {state}"
            numbers = _numbers(learner, restarts)
            style = _STATE_STYLES.get(learner.state, "")
            table.add_row(name, Text(text, style=style), *(numbers[x] for x in shown))
        return table


def _numbers(learner: admin_pb2.LearnerStatus, restarts: int) -> dict[str, str]:
    """What stands in the columns, by their names."""
    rest = learner.dropped + learner.refused
    return {
        "step": f"{learner.local_step:,}",
        "loss": f"{learner.loss:.3f}" if learner.HasField("loss") else "-",
        "tokens/s": f"{learner.tokens_per_second:,.0f}",
        # Who has left follows nothing any more.
        "behind": "-" if learner.state in _HAS_LEFT else str(learner.versions_behind),
        "up": size(learner.bytes_up),
        "down": size(learner.bytes_down),
        "merged": f"{learner.accepted} (-{rest})" if rest else str(learner.accepted),
        "restarts": str(restarts) if restarts else "",
    }


def size(num_bytes: int) -> str:
    """Returns a number of bytes for people, as in ``1.5 MB``."""
    value = float(num_bytes)
    for unit in _UNITS:
        if value < 1000.0 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000.0
    raise AssertionError(unit)


def natural(name: str) -> tuple[str, int]:
    """Sorts names by their numbers: ``learner-2`` before ``learner-10``."""
    prefix, _, number = name.rpartition("-")
    return (prefix, int(number)) if number.isdigit() else (name, -1)
