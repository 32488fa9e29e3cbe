"""The live view of a fleet: a table where the terminal can show one, a line elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from decoupled_diloco.v1 import admin_pb2
from diloco_fleet.data_view import data_lines
from diloco_fleet.learner_table import LearnerTable, natural, size
from diloco_fleet.metrics import Evaluation
from diloco_fleet.status import Seen, who_leads

_ETA_WINDOW_S: Final = 60.0
_ASKING: Final = ("collecting", "suspended", "grace")
"""States of a round in which its learners are not all asked yet: it wants as many as the quorum."""
_RUNNING: Final = ("", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Everything that a view shows.

    Attributes:
        run_id: id of the run.
        address: of the synchronizer; of several, separated by commas.
        phase: of the supervisor; empty where it is not known.
        status: the synchronizer's last answer; None before the first.
        away_s: how long the synchronizer has not answered; 0 while it does.
        eta_s: estimated seconds to the last global step; None while unknown.
        evaluation: the last one; None before the first.
        processes: state of every process as the supervisor sees it, with its restarts.
        synchronizers: every synchronizer as it last answered.
        pages: where a browser finds the status page of each.
    """

    run_id: str
    address: str
    phase: str = ""
    status: admin_pb2.GetStatusResponse | None = None
    away_s: float = 0.0
    eta_s: float | None = None
    evaluation: Evaluation | None = None
    processes: Mapping[str, tuple[str, int]] | None = None
    synchronizers: Sequence[Seen] = ()
    pages: Sequence[str] = ()

    @property
    def missed(self) -> bool:
        """Whether the synchronizer has answered before, should now, and does not."""
        return self.status is not None and self.away_s > 0.0 and self.phase in _RUNNING


class Eta:
    """Estimates when the last global step will be there, from the pace of the last minute."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def of(
        self,
        now: float,
        status: admin_pb2.GetStatusResponse | None,
        *,
        phase: str = "",
        away_s: float = 0.0,
    ) -> float | None:
        """Returns the seconds that remain; None, and a new beginning, while nothing moves on.

        Args:
            now: monotonic, seconds.
            status: the synchronizer's last answer.
            phase: of the supervisor; empty where it is not known.
            away_s: how long the synchronizer has not answered.
        """
        moving = phase in _RUNNING and away_s == 0.0
        if status is None or not moving or status.state in ("draining", "complete"):
            self._seen.clear()
            return None
        return self.estimate(now, status.global_step, status.total_global_steps)

    def estimate(self, now: float, global_step: int, total: int) -> float | None:
        """Returns the seconds that remain; None without end or before there is a pace."""
        if self._seen and global_step < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, global_step))
        while now - self._seen[0][0] > _ETA_WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()
        since_s, num_steps = now - self._seen[0][0], global_step - self._seen[0][1]
        if not total or num_steps <= 0 or since_s <= 0.0:
            return None
        return max(total - global_step, 0) * since_s / num_steps


def render(scene: Scene) -> RenderableType:
    """Returns the scene as a table with what stands around it."""
    status = scene.status
    if status is None:
        waiting = Text("waiting for the synchronizer to answer", style="dim")
        return Group(_headline(scene), waiting, process_table(scene.processes or {}))
    parts: list[RenderableType] = [_headline(scene), _progress(status, scene.eta_s)]
    parts += [Text(line) for line in leadership_lines(scene.synchronizers)]
    if scene.pages:
        parts.append(Text(pages_line(scene.pages)))
    parts.append(LearnerTable(status, scene.processes or {}))
    parts += [Text(line) for line in _round_lines(status)]
    if scene.evaluation is not None:
        parts.append(Text(_evaluation_text(scene.evaluation)))
    return Group(*parts)


def _headline(scene: Scene) -> Text:
    text = Text.assemble((scene.run_id, "bold"), f"  {scene.address}")
    states = [_phase(scene), scene.status.state if scene.status else ""]
    text.append("  " + ", ".join(dict.fromkeys(state for state in states if state)))
    if scene.missed:
        text.append(
            f"  synchronizer away for {duration(scene.away_s)}, learners train on", style="yellow"
        )
    return text


def pages_line(pages: Sequence[str]) -> str:
    """Returns where a browser finds the status page of each synchronizer."""
    return f"status page{'s' if len(pages) > 1 else ''}: {', '.join(pages)}"


def leadership_lines(synchronizers: Sequence[Seen]) -> list[str]:
    """Returns who leads and who follows, then how the leader is backed; nothing for one alone."""
    if len(synchronizers) < 2:
        return []
    roles = [f"{x.address} {x.role}" + (f" term {x.term}" if x.term else "") for x in synchronizers]
    lines = ["synchronizers: " + ", ".join(roles)]
    leader = who_leads(synchronizers)
    if leader is not None and leader.status is not None:
        lines.append(_backing(leader.status.replication))
    return lines


def _backing(replication: admin_pb2.ReplicationStatus) -> str:
    """How the leader is backed, in words."""
    standbys = [
        f"standby {x.standby_id} {'in sync' if x.in_sync else 'not in sync'} at "
        f"global step {x.acked_global_step}" + ("" if x.connected else ", not connected")
        for x in replication.replicas
    ]
    parts = [f"replication {replication.mode or 'unknown'}", *(standbys or ["no standby in sync"])]
    parts.append("lease held" if replication.lease_held else "lease not held")
    if replication.unsafe_rounds:
        parts.append(f"a take-over now would lose {replication.unsafe_rounds} rounds")
    return ", ".join(parts)


def _phase(scene: Scene) -> str:
    """Phase of the supervisor, which calls running what has not begun yet, too."""
    return "starting" if scene.status is None and scene.phase in _RUNNING else scene.phase


def process_table(processes: Mapping[str, tuple[str, int]]) -> Table:
    """Returns the state of every process as the supervisor sees it, with its restarts."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("process", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("restarts", justify="right", no_wrap=True)
    for name in sorted(processes, key=natural):
        state, restarts = processes[name]
        table.add_row(name, state, str(restarts))
    return table


def _progress(status: admin_pb2.GetStatusResponse, eta_s: float | None) -> RenderableType:
    total = status.total_global_steps
    counts = f"global step {status.global_step}" + (f" / {total}" if total else "")
    if not total:
        return Text(counts)
    row = Table.grid(padding=(0, 1))
    remaining = "" if eta_s is None else f"about {duration(eta_s)} to go"
    row.add_row(
        counts, ProgressBar(total=total, completed=min(status.global_step, total), width=30),
        f"{status.global_step / total:.0%}", remaining,
    )  # fmt: skip
    return row


def _round_lines(status: admin_pb2.GetStatusResponse) -> list[str]:
    pace = status.pace
    lines = [
        f"since the synchronizer's start {duration(status.uptime_seconds)} ago: "
        f"{', '.join(_totals(status.totals))}",
        "up, down, merged: since the same start   merged: contributions, (-N) pushes not merged   "
        "behind: fragments whose published version is not applied yet",
        f"quorum {status.quorum}   grace {pace.grace_seconds:.3f} s   inner step "
        f"{pace.step_seconds:.3f} s",
    ]
    for entry in status.rounds:
        wanted = len(entry.pending) + len(entry.accepted)
        if entry.state in _ASKING:
            wanted = max(wanted, status.quorum)
        grace = f", grace {entry.grace_seconds:.3f} s" if entry.grace_seconds else ""
        lines.append(
            f"round {entry.global_step} of fragment {entry.fragment}: {entry.state}, "
            f"{len(entry.accepted)} of {wanted} contributions{grace}"
        )
    lines += data_lines(status)
    reasons = [f"{x.learner_id} {x.last_reason}" for x in status.learners if x.last_reason]
    if reasons:
        lines.append(f"last pushes not merged: {', '.join(reasons)}")
    lines += [
        f"{x.learner_id} is left out: {x.quarantine}" for x in status.learners if x.quarantine
    ]
    lines += _snapshot_lines(status.snapshot)
    lines += [wait_text(wait) for wait in status.waits]
    return lines


def _snapshot_lines(snapshot: admin_pb2.SnapshotStatus) -> list[str]:
    """What became of the last snapshot, and who is not in it; nothing before the first."""
    if not snapshot.last:
        return []
    if snapshot.failure:
        return [f"snapshot {snapshot.last} failed: {snapshot.failure}"]
    out = [f"{name} ({why})" for name, why in sorted(snapshot.left_out.items())]
    without = f", without {', '.join(out)}" if out else ""
    return [f"snapshot {snapshot.last} is complete{without}"]


def _totals(totals: admin_pb2.Totals) -> list[str]:
    """What the synchronizer has counted since its start; a dash for what has no value yet."""
    return [
        f"up {size(totals.bytes_up)}",
        f"down {size(totals.bytes_down)}",
        f"participation {totals.participation:.0%}" if totals.live else "participation -",
        f"measured H {totals.measured_h:.1f}" if totals.measured_h > 0.0 else "measured H -",
    ]


def wait_text(wait: admin_pb2.Wait) -> str:
    """Returns what waits, for how long and for what, in words."""
    detail = f": {wait.detail}" if wait.detail else ""
    return f"{wait.subject} has waited {duration(wait.seconds)}, {wait.reason}{detail}"


def _evaluation_text(evaluation: Evaluation) -> str:
    return (
        f"held-out loss {evaluation.loss:.4f} nats per token at global step "
        f"{evaluation.global_step}"
    )


def plain_line(scene: Scene) -> str:
    """Returns the scene as one line without colours or control characters."""
    status = scene.status
    if status is None:
        return f"{_phase(scene)}: waiting for the synchronizer to answer"
    total = f"/{status.total_global_steps}" if status.total_global_steps else ""
    parts = [f"global step {status.global_step}{total}"]
    if scene.eta_s is not None:
        parts.append(f"about {duration(scene.eta_s)} to go")
    live = [learner for learner in status.learners if learner.state == "live"]
    # When all have finished, their last losses stay.
    shown = live or status.learners
    losses = [learner.loss for learner in shown if learner.HasField("loss")]
    parts.append(f"live {len(live)}/{len(status.learners)}")
    if losses:
        parts.append(f"loss {sum(losses) / len(losses):.3f}")
    if scene.evaluation is not None:
        evaluation = scene.evaluation
        parts.append(f"held-out loss {evaluation.loss:.3f} at {evaluation.global_step}")
    parts += [
        f"tokens/s {sum(learner.tokens_per_second for learner in live):,.0f}",
        f"fragments behind {max((learner.versions_behind for learner in live), default=0)}",
        f"quorum {status.quorum}",
        f"grace {status.pace.grace_seconds:.3f}s",
        f"since the synchronizer's start {duration(status.uptime_seconds)} ago: "
        f"{', '.join(_totals(status.totals))}",
    ]
    parts += leadership_lines(scene.synchronizers)[:1]
    if scene.missed:
        parts.append(f"synchronizer away {duration(scene.away_s)}")
    parts += [wait_text(wait) for wait in status.waits if wait.seconds >= 1.0]
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """Returns a time for people, as in ``45 s`` or ``1:02:03``."""
    if seconds < 60.0:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
