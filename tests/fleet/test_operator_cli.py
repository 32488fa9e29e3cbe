"""``diloco quorum``, ``drain``, ``rollback``: what they ask, and what they say."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import grpc
import pytest
from click.testing import CliRunner, Result

from decoupled_diloco.channel import MAX_MESSAGE_BYTES, server_options, to_status
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import admin_pb2 as pb
from decoupled_diloco.v1 import admin_pb2_grpc, types_pb2
from diloco_fleet import cli
from diloco_fleet.run_files import FleetFile, RunFiles, hold_run
from diloco_fleet.status import StatusClient
from synchronizer_server.joining import MAX_LEARNERS


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def entry(arguments: tuple[str, ...]) -> None:
    cli.main(list(arguments))


def diloco(*arguments: str) -> Result:
    return CliRunner().invoke(entry, ["--", *arguments])


def refuse(context: grpc.ServicerContext, error: DilocoError) -> None:
    context.abort_with_status(to_status(error))


VERSION = types_pb2.Version(term=2, global_step=17, digest=b"\xab" * 32)


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """A fleet of two live learners, one of them left out."""

    def __init__(self, role: str = "") -> None:
        self.role = role
        self.quorum = 1
        self.asked: list[Any] = []
        self.slow = 0
        self.waits: list[list[pb.Wait]] = []
        self.snapshots: list[pb.SnapshotStatus] = []

    def GetStatus(self, request: Any, context: Any) -> pb.GetStatusResponse:  # noqa: N802
        learners = [
            pb.LearnerStatus(learner_id="a", state="live"),
            pb.LearnerStatus(learner_id="b", state="live"),
            pb.LearnerStatus(learner_id="c", state="live", quarantine="NON_FINITE"),
            pb.LearnerStatus(learner_id="d", state="gone"),
        ]
        return pb.GetStatusResponse(
            role=self.role, quorum=self.quorum, learners=learners,
            waits=self.waits.pop(0) if self.waits else (),
            snapshot=self.snapshots.pop(0) if self.snapshots else None,
        )  # fmt: skip

    def SetQuorum(self, request: Any, context: Any) -> pb.SetQuorumResponse:  # noqa: N802
        self.asked.append(request)
        self.quorum = request.quorum
        return pb.SetQuorumResponse(quorum=self.quorum)

    def DrainLearner(self, request: Any, context: Any) -> pb.DrainLearnerResponse:  # noqa: N802
        self.asked.append(request)
        if request.learner_id == "e":
            return pb.DrainLearnerResponse(already_drained=True)
        if request.learner_id != "a":
            refuse(context, DilocoError(Reason.UNKNOWN_LEARNER, "no learner 'z'; learners are a"))
        return pb.DrainLearnerResponse()

    def RollBackFragment(  # noqa: N802
        self, request: Any, context: Any
    ) -> pb.RollBackFragmentResponse:
        self.asked.append(request)
        if request.fragment == 99:
            refuse(context, DilocoError(Reason.UNKNOWN_FRAGMENT, "there is no fragment 99"))
        if request.fragment == 9:
            refuse(context, DilocoError(Reason.STALE_BASE, "nothing older is retained"))
        if self.slow:
            self.slow -= 1
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "")
        return pb.RollBackFragmentResponse(version=VERSION)

    def TakeSnapshot(self, request: Any, context: Any) -> pb.TakeSnapshotResponse:  # noqa: N802
        self.asked.append(request)
        if self.slow:
            self.slow -= 1
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "")
        return pb.TakeSnapshotResponse(snapshot_id="2.17")


def waits_for(*missing: str) -> list[pb.Wait]:
    """What a fleet says that waits for its quorum, and what it says of a healthy round."""
    detail = f"not live: {', '.join(missing)}"
    return [
        pb.Wait(subject="round 17", reason="quorum", detail=detail, seconds=12.0),
        pb.Wait(subject="round 18", reason="pulling", detail="for a", seconds=0.2),
    ]


@contextmanager
def served(servicer: Admin) -> Iterator[str]:
    """Serves it; yields the address."""
    pool = futures.ThreadPoolExecutor(max_workers=2)
    server = grpc.server(pool, options=server_options())
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def admin() -> Iterator[tuple[Admin, str]]:
    servicer = Admin()
    with served(servicer) as address:
        yield servicer, address


def test_the_quorum_is_shown_and_set(admin: tuple[Admin, str]) -> None:
    servicer, address = admin
    shown = diloco("quorum", "--address", address)
    assert (shown.exit_code, shown.output) == (0, "quorum 1, 2 learners live\n")
    assert not servicer.asked
    done = diloco("quorum", "set", "3", "--address", address)
    assert done.exit_code == 0
    assert done.output.startswith("quorum 3, 2 learners live: merging waits for more")
    assert servicer.quorum == 3
    assert servicer.asked[0].request_id


def test_a_fleet_of_as_many_learners_as_may_be_is_shown() -> None:
    """Its status is larger than any other message."""
    learners = [
        pb.LearnerStatus(
            learner_id=f"{i:05}", state="live", labels={"host": "h" * 256, "b": "b" * 256}
        )
        for i in range(MAX_LEARNERS)
    ]
    status = pb.GetStatusResponse(role="leading", quorum=1, learners=learners)
    assert status.ByteSize() > MAX_MESSAGE_BYTES
    servicer = Admin()
    servicer.GetStatus = lambda *_: status  # type: ignore[method-assign]
    with served(servicer) as address:
        shown = diloco("quorum", "--address", address)
        assert shown.output == f"quorum 1, {MAX_LEARNERS} learners live\n"
        client = StatusClient(address)
        assert len(client.status().learners) == MAX_LEARNERS
        client.close()


@pytest.mark.parametrize("words", [["3"], ["set"], ["set", "x"], ["set", "0"], ["set", "1", "2"]])
def test_a_quorum_that_is_not_understood_asks_nothing(
    admin: tuple[Admin, str], words: list[str]
) -> None:
    result = diloco("quorum", *words, "--address", admin[1])
    assert result.exit_code == 64
    assert result.stderr.startswith("error: CONFIG_INVALID: ")
    assert not admin[0].asked


def test_the_fleet_is_found_by_its_run_directory(
    admin: tuple[Admin, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "RUN_NOT_FOUND" in diloco("quorum").stderr
    root = tmp_path / "runs" / "amber"
    root.mkdir(parents=True)
    FleetFile(
        run_id="amber", address=admin[1], pid=1, state="running", started=1.0, processes=()
    ).write(root / "fleet.json")
    with hold_run(RunFiles(root)):
        assert diloco("quorum").output.startswith("quorum 1")
    assert diloco("quorum", "--run-dir", str(root)).output.startswith("quorum 1")
    both = diloco("quorum", "--run-dir", str(root), "--address", admin[1])
    assert "CONFIG_CONFLICT" in both.stderr


def test_a_learner_is_asked_to_leave(admin: tuple[Admin, str]) -> None:
    servicer, address = admin
    done = diloco("drain", "a", "--reason", "new disk", "--address", address)
    assert (done.exit_code, done.output) == (0, "a was asked to finish its step and leave\n")
    assert (servicer.asked[0].learner_id, servicer.asked[0].reason) == ("a", "new disk")
    again = diloco("drain", "e", "--address", address)
    assert (again.exit_code, again.output) == (0, "e is drained already\n")
    gone = diloco("drain", "z", "--address", address)
    assert gone.stderr == "error: UNKNOWN_LEARNER: no learner 'z'; learners are a\n"
    assert gone.exit_code == 64, "a name that nobody has stays wrong, however often it is tried"


def test_a_fragment_is_put_back_and_waited_for(admin: tuple[Admin, str]) -> None:
    servicer, address = admin
    servicer.slow = 2
    done = diloco("rollback", "3", "--reason", "it went bad", "--address", address)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "waiting for the next round of fragment 3",
        "fragment 3 is put back: version 2.17, digest abababababab",
    ]
    assert {x.request_id for x in servicer.asked} == {servicer.asked[0].request_id}
    assert len(servicer.asked) == 3, "one order, asked for three times"


def test_what_the_fleet_waits_for_is_said_when_it_changes(admin: tuple[Admin, str]) -> None:
    servicer, address = admin
    servicer.slow = 3
    servicer.waits = [waits_for("c", "d"), waits_for("c", "d"), waits_for("d")]
    done = diloco("rollback", "3", "--reason", "it went bad", "--address", address)
    assert done.output.splitlines()[:-1] == [
        "waiting for the next round of fragment 3",
        "round 17 has waited 12 s, quorum: not live: c, d",
        "round 17 has waited 12 s, quorum: not live: d",
    ]
    servicer.slow = 1
    servicer.waits = [waits_for("d")]
    done = diloco("snapshot", "--no-wait", "--address", address)
    assert (done.exit_code, done.stdout) == (0, "snapshot 2.17 has begun\n")
    assert done.stderr.splitlines() == [
        "waiting for the next round, which becomes the cut",
        "round 17 has waited 12 s, quorum: not live: d",
    ]


def test_a_snapshot_without_a_round_is_given_up_with_the_reason(admin: tuple[Admin, str]) -> None:
    servicer, address = admin
    servicer.slow = 9
    servicer.waits = [waits_for("d")]
    late = diloco("snapshot", "--timeout", "0", "--address", address)
    assert late.exit_code == 75
    told = late.stderr.splitlines()[-1]
    assert told.startswith("error: UNAVAILABLE: no round was committed within 0 s; the next one")
    assert told.endswith("(round 17 has waited 12 s, quorum: not live: d)")


def test_whose_part_of_a_snapshot_is_awaited_is_said_and_not_for_ever(
    admin: tuple[Admin, str],
) -> None:
    servicer, address = admin
    part = pb.Wait(subject="snapshot 17", reason="snapshot", detail="for b", seconds=3.0)
    over = pb.SnapshotStatus(last="2.17", complete="2.17", participants=["a", "b"])
    servicer.snapshots = [pb.SnapshotStatus(pending="2.17"), over]
    servicer.waits = [[*waits_for("d"), part]]
    done = diloco("snapshot", "--address", address)
    assert done.stdout == "snapshot 2.17 is complete, of a, b\n"
    assert done.stderr.splitlines()[-1] == "snapshot 17 has waited 3 s, snapshot: for b"
    servicer.snapshots = [pb.SnapshotStatus(pending="2.17")]
    servicer.waits = [[part]]
    late = diloco("snapshot", "--timeout", "0", "--address", address)
    assert late.exit_code == 75
    assert "snapshot 2.17 is not complete within 0 s; it goes on all the same" in late.stderr


def test_what_cannot_be_put_back_says_why(admin: tuple[Admin, str]) -> None:
    servicer, address = admin
    refused = diloco("rollback", "9", "--reason", "x", "--address", address)
    assert refused.stderr == "error: STALE_BASE: nothing older is retained\n"
    assert refused.exit_code == 75, "after the next rounds there is something to go back to"
    unknown = diloco("rollback", "99", "--reason", "x", "--address", address)
    assert unknown.stderr == "error: UNKNOWN_FRAGMENT: there is no fragment 99\n"
    assert unknown.exit_code == 64, "the number is wrong, and no fault of ours"
    assert "--reason" in diloco("rollback", "3", "--address", address).stderr
    assert "--reason is empty" in diloco("rollback", "3", "--reason", " ").stderr
    servicer.slow = 9
    late = diloco("rollback", "3", "--reason", "x", "--timeout", "0", "--address", address)
    assert late.exit_code == 75
    assert "put back with its next round all the same" in late.stderr


def test_a_synchronizer_that_is_away_is_named() -> None:
    for command in (["quorum"], ["drain", "a"], ["rollback", "1", "--reason", "x"]):
        result = diloco(*command, "--address", "127.0.0.1:1")
        assert result.exit_code == 75
        assert "UNAVAILABLE: no synchronizer answers at 127.0.0.1:1" in result.stderr


def test_of_several_synchronizers_the_leader_is_asked() -> None:
    follower, leader = Admin("following"), Admin("leading")
    with served(follower) as first, served(leader) as second:
        addresses = f"127.0.0.1:1,{first},{second}"
        done = diloco("quorum", "set", "2", "--address", addresses)
        assert (done.exit_code, done.output) == (0, "quorum 2, 2 learners live\n")
        assert diloco("drain", "a", "--address", addresses).exit_code == 0
        assert len(leader.asked) == 2
        leader.role = "following"
        nobody = diloco("quorum", "set", "1", "--address", addresses)
        assert nobody.exit_code == 75
        assert f"UNAVAILABLE: no synchronizer of {addresses} leads now" in nobody.stderr
        assert (follower.quorum, leader.quorum) == (1, 2)


@pytest.mark.parametrize("text", ["0", "x", "1.5", str(2**32), "9" * 5000])
def test_a_quorum_that_cannot_be_is_told_without_asking_anybody(text: str) -> None:
    done = diloco("quorum", "set", text, "--address", "127.0.0.1:1")
    assert done.exit_code != 0
    assert "CONFIG_INVALID" in done.output
    assert len(done.output) < 500
