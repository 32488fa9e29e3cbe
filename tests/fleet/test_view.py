"""What the live view shows of a status."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from decoupled_diloco.plain import to_plain
from decoupled_diloco.v1 import admin_pb2
from diloco_fleet.learner_table import LearnerTable, size
from diloco_fleet.metrics import Evaluation
from diloco_fleet.screen import LineScreen, TableScreen, open_screen
from diloco_fleet.view import Eta, Scene, duration, plain_line, render


def status() -> admin_pb2.GetStatusResponse:
    learners = [
        admin_pb2.LearnerStatus(
            learner_id="learner-0", state="live", local_step=1234, loss=2.345,
            tokens_per_second=5000.4, versions_behind=3, bytes_up=1_500_000, bytes_down=999,
            accepted=40, dropped=1, refused=1, last_reason="TOO_LATE",
        ),
        admin_pb2.LearnerStatus(learner_id="learner-10", state="gone", local_step=7),
        admin_pb2.LearnerStatus(learner_id="learner-2", state="live", loss=2.445),
    ]  # fmt: skip
    return admin_pb2.GetStatusResponse(
        run_id="amber",
        state="running",
        global_step=200,
        total_global_steps=800,
        quorum=2,
        waits=[
            admin_pb2.Wait(
                subject="round 201", reason="quorum", detail="1 of 2: learner-2", seconds=12.0
            )
        ],
        rounds=[
            admin_pb2.RoundStatus(
                global_step=201, fragment=9, state="collecting", pending=["learner-0"],
                accepted=["learner-2"], grace_seconds=0.125,
            )
        ],
        learners=learners,
        pace=admin_pb2.PaceStatus(step_seconds=0.25, grace_seconds=0.125),
        totals=admin_pb2.Totals(live=40, participation=0.975, measured_h=24.5, bytes_up=1_500_000),
        uptime_seconds=12.0,
    )  # fmt: skip


def scene(**values: object) -> Scene:
    base: dict[str, object] = {
        "run_id": "amber",
        "address": "127.0.0.1:5",
        "phase": "running",
        "status": status(),
        "eta_s": 95.0,
        "evaluation": Evaluation(time=1.0, global_step=150, loss=2.71828),
        "processes": {"learner-0": ("running", 2), "learner-3": ("waiting", 1)},
        "pages": ("http://127.0.0.1:6/", "http://127.0.0.1:7/"),
    }
    return Scene(**(base | values))  # type: ignore[arg-type]


def drawn(what: Scene) -> str:
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(render(what))
    return console.export_text()


@pytest.mark.parametrize(
    "shown",
    [
        "amber  127.0.0.1:5",
        "global step 200 / 800",
        "25%",
        "about 1:35 to go",
        "1,234",
        "2.345",
        "5,000",
        "1.5 MB",
        "999 B",
        "40 (-2)",
        "last pushes not merged: learner-0 TOO_LATE",
        "quorum 2",
        "grace 0.125 s",
        "since the synchronizer's start 12 s ago: up 1.5 MB, down 0 B, participation 98%, ",
        "measured H 24.5",
        "up, down, merged: since the same start",
        "merged: contributions, (-N) pushes not merged",
        "round 201 of fragment 9: collecting, 1 of 2 contributions",
        "round 201 has waited 12 s, quorum: 1 of 2: learner-2",
        "held-out loss 2.7183 nats per token at global step 150",
        "status pages: http://127.0.0.1:6/, http://127.0.0.1:7/",
    ],
)
def test_the_table_shows(shown: str) -> None:
    assert shown in drawn(scene())


def test_the_table_counts_the_restarts_of_a_process() -> None:
    header, row = (
        line for line in drawn(scene()).splitlines() if line.startswith(("learner ", "learner-0 "))
    )
    assert (header.split()[-1], row.split()[-1]) == ("restarts", "2")


def test_a_learner_that_is_drained_is_shown_so_once() -> None:
    seen = status()
    seen.learners[1].state = "drained"
    text = drawn(scene(status=seen, processes={"learner-10": ("drained", 0)}))
    row = next(line for line in text.splitlines() if line.startswith("learner-10 "))
    assert row.split()[1:3] == ["drained", "7"]


def test_who_is_not_in_the_last_snapshot_is_named_with_the_reason() -> None:
    seen = status()
    assert "snapshot" not in drawn(scene(status=seen))
    seen.snapshot.last = "1.200"
    assert "snapshot 1.200 is complete\n" in drawn(scene(status=seen)).replace(" \n", "\n")
    seen.snapshot.left_out["learner-2"] = "it has no directory for its part"
    shown = "snapshot 1.200 is complete, without learner-2 (it has no directory for its part)"
    assert shown in drawn(scene(status=seen))
    seen.snapshot.failure = "no learner is in it"
    assert "snapshot 1.200 failed: no learner is in it" in drawn(scene(status=seen))


def test_a_narrow_terminal_still_shows_every_number() -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render(scene()))
    row = next(line for line in console.export_text().splitlines() if "learner-0 " in line)
    for part in ("live", "1,234", "2.345", "5,000", "1.5 MB", "999 B"):
        assert part in row


@pytest.mark.parametrize("width", range(12, 141, 4))
def test_a_narrow_terminal_drops_columns_and_cuts_no_value(width: int) -> None:
    seen = status()
    seen.learners[1].state = "disconnected"
    seen.learners[2].bytes_down = 456_000_000_000
    seen.learners[2].accepted, seen.learners[2].dropped = 12_345, 678
    processes = {"learner-10": ("restarting", 12), "learner-0": ("running", 0)}

    def table(columns: int) -> list[str]:
        console = Console(width=columns, file=io.StringIO(), record=True)
        console.print(LearnerTable(seen, processes))
        return [line.rstrip() for line in console.export_text().splitlines()]

    wide, narrow = table(1000), table(width)
    assert wide[0].split()[2:] == [
        "step", "loss", "tokens/s", "behind", "up", "down", "merged", "restarts",
    ]  # fmt: skip
    assert "disconnected, restarting" in wide[3]
    assert not any("…" in line for line in narrow)
    assert max(map(len, narrow)) <= width
    words = set(" ".join(wide).split())
    if width >= 48:
        assert set(" ".join(narrow).split()) <= words, "a value is there whole or not at all"
        assert "disconnected, restarting" in narrow[3]


def test_who_has_left_is_behind_nothing() -> None:
    seen = status()
    for state, shown in (("drained", "-"), ("left", "-"), ("gone", "24")):
        seen.learners[1].state, seen.learners[1].versions_behind = state, 24
        row = next(x for x in drawn(scene(status=seen)).splitlines() if x.startswith("learner-10 "))
        assert row.split()[5] == shown


@pytest.mark.parametrize(
    ("state", "accepted", "pending", "shown"),
    [
        ("collecting", [], [], "0 of 3"), ("collecting", ["a", "b"], [], "2 of 3"),
        ("suspended", ["a"], [], "1 of 3"), ("grace", [], [], "0 of 3"),
        ("pulling", ["a"], ["b", "c", "d"], "1 of 4"), ("merging", ["a", "b"], [], "2 of 2"),
    ],
)  # fmt: skip
def test_a_round_wants_its_quorum_before_anybody_is_asked(
    state: str, accepted: list[str], pending: list[str], shown: str
) -> None:
    seen = status()
    seen.quorum = 3
    del seen.rounds[:]
    seen.rounds.add(global_step=7, state=state, accepted=accepted, pending=pending)
    assert f"round 7 of fragment 0: {state}, {shown} contributions" in drawn(scene(status=seen))


def test_learners_stand_in_the_order_of_their_numbers_also_before_they_have_joined() -> None:
    text = drawn(scene())
    positions = [text.index(f"learner-{number} ") for number in (0, 2, 3, 10)]
    assert positions == sorted(positions)
    assert "waiting" in text[positions[2] :].splitlines()[0]


def test_a_synchronizer_that_is_away_is_shown_and_is_no_error() -> None:
    away = scene(away_s=75.0)
    assert "synchronizer away for 1:15, learners train on" in drawn(away)
    assert "synchronizer away 1:15" in plain_line(away)


@pytest.mark.parametrize("phase", ["finishing", "draining", "ended"])
def test_a_synchronizer_that_is_to_end_is_not_missed(phase: str) -> None:
    ending = scene(phase=phase, away_s=2.0)
    assert "away" not in drawn(ending)
    assert "train on" not in drawn(ending)
    assert "away" not in plain_line(ending)


def test_before_the_first_answer() -> None:
    nothing = scene(status=None, away_s=12.0)
    assert "amber  127.0.0.1:5  starting" in drawn(nothing)
    assert "waiting for the synchronizer to answer" in drawn(nothing)
    assert "away" not in drawn(nothing), "nothing has started yet"
    assert plain_line(nothing) == "starting: waiting for the synchronizer to answer"
    assert plain_line(scene(status=None, phase="draining")).startswith("draining: ")


def test_before_the_first_round_its_figures_are_a_dash() -> None:
    early = status()
    early.totals.Clear()
    for shown in (drawn(scene(status=early)), plain_line(scene(status=early))):
        assert "participation -, measured H -" in shown


def test_the_last_loss_stays_when_the_learners_have_finished() -> None:
    ended = status()
    for learner in ended.learners:
        learner.state = "left"
    line = plain_line(scene(status=ended))
    assert "live 0/3" in line
    assert "loss 2.395" in line


def test_the_plain_line_is_one_line_with_everything_that_matters() -> None:
    line = plain_line(scene())
    assert "\n" not in line
    assert "\x1b" not in line
    for part in (
        "step 200/800",
        "about 1:35 to go",
        "live 2/3",
        "loss 2.395",
        "held-out loss 2.718 at 150",
        "fragments behind 3",
        "since the synchronizer's start 12 s ago: up 1.5 MB, down 0 B, participation 98%, ",
        "measured H 24.5",
        "quorum 2",
        "grace 0.125s",
        "round 201 has waited 12 s, quorum: 1 of 2: learner-2",
    ):
        assert part in line


def test_a_run_without_end_has_no_progress_bar() -> None:
    endless = status()
    endless.total_global_steps = 0
    second_line = drawn(scene(status=endless, eta_s=None)).splitlines()[1]
    assert second_line.strip() == "global step 200"
    assert plain_line(scene(status=endless)).startswith("global step 200 |")


def test_eta_from_the_pace_seen_so_far() -> None:
    eta = Eta()
    assert eta.estimate(10.0, 100, 300) is None
    assert eta.estimate(20.0, 150, 300) == pytest.approx(30.0)
    assert eta.estimate(20.0, 150, 0) is None
    assert eta.estimate(30.0, 40, 300) is None, "a synchronizer that went back starts it anew"
    assert eta.estimate(80.0, 90, 300) == pytest.approx(210.0)
    assert eta.estimate(100.0, 290, 300) == pytest.approx(1.0), "an old pace is forgotten"


@pytest.mark.parametrize(
    ("phase", "state", "away_s"),
    [("running", "running", 3.0), ("draining", "running", 0.0), ("running", "draining", 0.0)],
)
def test_eta_does_not_count_on_while_nothing_moves(phase: str, state: str, away_s: float) -> None:
    eta, seen = Eta(), status()
    assert eta.of(10.0, seen) is None
    seen.global_step = 300
    assert eta.of(20.0, seen, phase="running") == pytest.approx(50.0)
    seen.state = state
    assert eta.of(40.0, seen, phase=phase, away_s=away_s) is None
    seen.state = "running"
    assert eta.of(50.0, seen) is None, "the time that was lost is not in the pace"
    seen.global_step = 400
    assert eta.of(60.0, seen) == pytest.approx(40.0)


def test_lines_where_the_console_is_no_terminal() -> None:
    lines: list[str] = []
    screen = open_screen(Console(file=io.StringIO()), lines.append)
    assert isinstance(screen, LineScreen)
    with screen:
        screen.say("hello")
        screen.tick(scene)
        screen.tick(scene)
    assert len(lines) == 2, "within one interval the second tick is silent"
    assert lines[0].endswith(" hello")


def test_a_reader_that_went_away_stops_nothing() -> None:
    def write(_: str) -> None:
        raise BrokenPipeError

    screen = LineScreen(write)
    screen.say("one")
    screen.say("two")


def test_a_table_where_the_console_is_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, _environ={"TERM": "xterm"})
    screen = open_screen(console, print)
    assert isinstance(screen, TableScreen)
    with screen:
        screen.tick(scene)
        screen.say("learner-0 died [again]")
    assert "learner-2" in out.getvalue()
    assert "learner-0 died [again]" in out.getvalue()


def test_sizes_and_durations() -> None:
    assert [size(n) for n in (0, 999, 1000, 2_500_000, 10**16)] == [
        "0 B", "999 B", "1.0 kB", "2.5 MB", "10000.0 TB",
    ]  # fmt: skip
    assert [duration(s) for s in (0.4, 59, 60, 3723)] == ["0 s", "59 s", "1:00", "1:02:03"]


def test_a_message_as_plain_values() -> None:
    """Numbers stay numbers (JSON of protobuf makes texts of 64-bit ones).

    None is what is unset, and what JSON has no word for.
    """
    seen = status()
    seen.uptime_seconds = float("nan")
    values = to_plain(seen)
    assert values["uptime_seconds"] is None
    assert values["global_step"] == 200
    assert values["learners"][0]["loss"] == pytest.approx(2.345)
    assert values["learners"][1]["loss"] is None
    assert values["claim"] is None
    assert values["totals"]["pushes_by_reason"] == {}
    assert values["rounds"][0]["pending"] == ["learner-0"]


def test_leased_data_and_the_tokens_of_every_learner_are_shown():
    seen = status()
    assert "data:" not in shown_text(seen)
    seen.versions.add()
    seen.versions.add()
    seen.data.CopyFrom(
        admin_pb2.DataStatus(
            mode="leases", epoch=3, num_free=8, num_leased=96, num_merged=6600, num_returned=40
        )
    )
    first = seen.learners[0]
    first.tokens_processed, first.tokens_merged = 61_440, 100_000
    first.data_position, first.data_stop = 52, 64
    text = shown_text(seen)
    assert "data: epoch 3, 8 samples free, 96 on lease, 6,600 merged, 40 given back" in text
    assert "learner-0 61,440 / 50,000 (sample 52, lease to 64)" in text
    for i in range(20):
        seen.learners.add(learner_id=f"x{i}", tokens_processed=1)
    assert "and 13 more" in shown_text(seen)


def shown_text(seen: admin_pb2.GetStatusResponse) -> str:
    console = Console(file=io.StringIO(), width=400)
    console.print(render(scene(status=seen)))
    return console.file.getvalue()
