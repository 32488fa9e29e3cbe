"""Several synchronizers as a status client sees them: who leads, who follows, who is away."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from rich.console import Console
from test_fleet_cli import diloco
from test_view import scene, status

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from diloco_fleet.status import Layout, Seen, StatusClient, StatusPoller, newest, who_leads
from diloco_fleet.view import plain_line, render

AWAY = "127.0.0.1:1"


class _Admin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, role: str, term: int) -> None:
        self._role, self._term = role, term

    def GetStatus(self, request: Any, context: Any) -> admin_pb2.GetStatusResponse:  # noqa: N802
        return admin_pb2.GetStatusResponse(
            run_id="amber",
            role=self._role,
            global_step=10 * self._term,
            claim=types_pb2.LeadershipClaim(term=self._term),
        )

    def GetRun(self, request: Any, context: Any) -> admin_pb2.GetRunResponse:  # noqa: N802
        if self._role != "leading":
            context.abort(grpc.StatusCode.UNAVAILABLE, "NOT_LEADING")
        return admin_pb2.GetRunResponse(
            settings=types_pb2.RunSettings(num_fragments=3),
            tensors=[types_pb2.TensorSpec(name="a", shape=[3, 4])],
        )


class Synchronizers:
    """Starts synchronizers that answer as they are told."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def start(self, role: str, term: int) -> str:
        server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
        admin_pb2_grpc.add_AdminServiceServicer_to_server(_Admin(role, term), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        self._stack.callback(lambda: server.stop(None).wait())
        return f"127.0.0.1:{port}"


@pytest.fixture
def synchronizers() -> Iterator[Synchronizers]:
    with ExitStack() as stack:
        yield Synchronizers(stack)


def client_of(*addresses: str) -> StatusClient:
    return StatusClient(",".join(addresses))


def test_the_status_is_that_of_the_leader_wherever_it_stands(synchronizers: Synchronizers) -> None:
    leader = synchronizers.start("leading", 3)
    client = client_of(AWAY, synchronizers.start("following", 3), leader)
    assert client.status().role == "leading"
    assert [entry.role for entry in client.look()] == ["away", "following", "leading"]
    assert client.layout() == Layout(num_parameters=12, num_fragments=3)
    client.close()


def test_of_two_that_claim_to_lead_the_higher_term_counts(synchronizers: Synchronizers) -> None:
    old, new = synchronizers.start("leading", 3), synchronizers.start("leading", 4)
    client = client_of(old, new)
    leading = who_leads(client.look())
    assert leading is not None
    assert leading.address == new
    client.close()


def test_without_a_leader_who_follows_is_shown_and_nobody_leads(
    synchronizers: Synchronizers,
) -> None:
    client = client_of(synchronizers.start("following", 2), synchronizers.start("waiting", 3))
    seen = client.look()
    assert who_leads(seen) is None
    answer = newest(seen)
    assert answer is not None
    assert answer.claim.term == 3
    client.close()


def test_where_nobody_answers_every_address_is_named() -> None:
    client = client_of(AWAY, "127.0.0.1:2")
    with pytest.raises(DilocoError, match=r"127\.0\.0\.1:1, 127\.0\.0\.1:2") as caught:
        client.look()
    assert caught.value.reason is Reason.UNAVAILABLE
    client.close()


def test_an_old_synchronizer_that_names_no_role_leads() -> None:
    seen = (Seen(address="a:1", status=admin_pb2.GetStatusResponse()),)
    assert who_leads(seen) == seen[0]


def test_the_poller_knows_who_leads(synchronizers: Synchronizers) -> None:
    follower, leader = synchronizers.start("following", 2), synchronizers.start("leading", 2)
    with StatusPoller(f"{follower},{leader}") as poller:
        for _ in range(600):
            if poller.snapshot().leader:
                break
            poller._stop.wait(0.05)
        assert poller.snapshot().leader == leader
        assert poller.snapshot().away_s == 0.0


def test_the_status_command_shows_all_of_them(synchronizers: Synchronizers) -> None:
    follower, leader = synchronizers.start("following", 2), synchronizers.start("leading", 2)
    address = f"{follower},{leader}"
    result = diloco("status", "--address", address, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.output)
    assert values["status"]["global_step"] == 20
    assert [(x["address"], x["role"], x["term"]) for x in values["synchronizers"]] == [
        (follower, "following", 2),
        (leader, "leading", 2),
    ]
    assert f"{leader} leading term 2" in diloco("status", "--address", address).output


def seen_by(replication: admin_pb2.ReplicationStatus) -> tuple[Seen, ...]:
    leading = status()
    leading.role, leading.claim.term = "leading", 7
    leading.replication.CopyFrom(replication)
    return (Seen(address="a:1", status=leading), Seen(address="b:2", status=None))


@pytest.mark.parametrize(
    ("replication", "shown"),
    [
        (
            admin_pb2.ReplicationStatus(
                mode="one",
                lease_held=True,
                replicas=[
                    admin_pb2.ReplicaStatus(
                        standby_id="s1", connected=True, in_sync=True, acked_global_step=41
                    )
                ],
            ),
            "replication one, standby s1 in sync at global step 41, lease held",
        ),
        (
            admin_pb2.ReplicationStatus(mode="off", unsafe_rounds=5),
            "replication off, no standby in sync, lease not held, a take-over now would lose 5",
        ),
    ],
)
def test_the_view_says_how_the_leader_is_backed(
    replication: admin_pb2.ReplicationStatus, shown: str
) -> None:
    console = Console(width=160, file=io.StringIO(), record=True)
    drawing = scene(synchronizers=seen_by(replication))
    console.print(render(drawing))
    text = console.export_text()
    assert "synchronizers: a:1 leading term 7, b:2 away" in text
    assert shown in text
    assert "synchronizers: a:1 leading term 7, b:2 away" in plain_line(drawing)


def test_the_view_of_one_synchronizer_has_no_such_line() -> None:
    assert "synchronizers:" not in plain_line(scene(synchronizers=seen_by(
        admin_pb2.ReplicationStatus())[:1]))  # fmt: skip
