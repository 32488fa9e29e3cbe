"""Packets that are held on real links, between network namespaces: what they carry arrives late."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.errors import DilocoError
from diloco_fleet.chaos import packet_delay
from diloco_fleet.chaos.docker_host import Host
from diloco_fleet.chaos.docker_links import LinkedContainer, Links, PacketDelay
from diloco_fleet.chaos.scenario import Fault, FaultKind
from diloco_fleet.chaos.undo import Undo
from tests.fleet.bridged import PATIENCE_S, Bridged, network_of

DELAY_S = 0.05
ANY: dict[str, Any] = {"who": "random learner", "at_s": (1.0,), "duration_s": 5.0}
LATE = Fault(fault=FaultKind.LATENCY, delay_s=DELAY_S, **ANY)
LOSSY = Fault(fault=FaultKind.LOSS, share=0.3, **ANY)
SLOW = Fault(fault=FaultKind.BANDWIDTH, mbit_per_s=8.0, **ANY)


class WithoutNetem(Host):
    """A host whose kernel lacks netem, whatever that of this machine has."""

    def refusal(self, *probe: str) -> str:
        return "no netem" if probe[:1] == ("netem",) else super().refusal(*probe)


@pytest.fixture
def bridged() -> Iterator[Bridged]:
    why = Host().refusal() or Host().missing("ip", "unshare", "nsenter", "tc")
    if why:
        pytest.skip(f"no links between network namespaces here: {why}")
    with network_of(None), ExitStack() as stack:
        why = packet_delay.refusal(Host())
        if why:
            pytest.skip(f"no packets can be held here: {why}")
        yield Bridged(stack, 3)


@pytest.fixture
def undo(bridged: Bridged) -> Iterator[Undo]:
    made = Undo()
    yield made
    assert made.heal_all() == []
    assert rules() == []


@pytest.fixture
def links() -> Links:
    return Links(WithoutNetem())


def rules() -> list[str]:
    programs = [x for x in ("iptables-save", "ip6tables-save") if shutil.which(x)]
    lines = [line for x in programs for line in Host().run(x, "-t", "mangle").splitlines()]
    return [line for line in lines if "NFQUEUE" in line]


def queues() -> int:
    return len(Path("/proc/thread-self/net/netfilter/nfnetlink_queue").read_text().splitlines())


def until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.01)


def send(near: socket.socket, far: socket.socket, num_packets: int) -> list[int]:
    """Numbers of datagrams that arrive, as far as they do, in the order in which they do."""
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    far.settimeout(4 * DELAY_S + 1.0)
    for number in range(num_packets):
        near.sendto(number.to_bytes(4, "big"), far.getsockname())
    arrived = []
    try:
        while len(arrived) < num_packets:
            arrived.append(int.from_bytes(far.recv(16), "big"))
    except TimeoutError:
        pass
    return arrived


def test_what_a_container_sends_and_gets_is_late_and_nothing_else(
    bridged: Bridged, links: Links, undo: Undo
) -> None:
    """Each way as long as it says; others, and who watches from the host, notice nothing."""
    links.disturb(0, LATE, bridged.containers[0], lambda x: undo.add(0, x))
    assert 2 * DELAY_S <= bridged.rtt_s(0, 1) < 4 * DELAY_S
    assert 2 * DELAY_S <= bridged.rtt_s(2, 0) < 4 * DELAY_S
    assert bridged.rtt_s(1, 2) < DELAY_S
    assert bridged.rtt_s(None, 0) < DELAY_S
    undo.heal(0)
    links.check(0)
    assert bridged.rtt_s(0, 1) < DELAY_S
    assert rules() == []
    assert queues() == 0


def test_packets_are_late_by_netem_where_the_kernel_has_it(bridged: Bridged, undo: Undo) -> None:
    Links(Host()).disturb(0, LATE, bridged.containers[0], lambda x: undo.add(0, x))
    assert (queues() == 0) is (Host().refusal("netem", "delay", "1ms") == "")
    assert 2 * DELAY_S <= bridged.rtt_s(0, 1) < 4 * DELAY_S
    undo.heal(0)
    assert bridged.rtt_s(0, 1) < DELAY_S


def test_ipv6_is_late_as_well(bridged: Bridged, links: Links, undo: Undo) -> None:
    if not bridged.ipv6:
        pytest.skip("the kernel has no IPv6")
    assert bridged.rtt_s(0, 1, ipv6=True) < DELAY_S
    links.disturb(0, LATE, bridged.containers[0], lambda x: undo.add(0, x))
    assert 2 * DELAY_S <= bridged.rtt_s(0, 1, ipv6=True) < 4 * DELAY_S
    assert bridged.rtt_s(1, 2, ipv6=True) < DELAY_S


def test_packets_keep_their_order_and_those_that_wait_at_the_end_are_let_go(
    bridged: Bridged, links: Links, undo: Undo
) -> None:
    links.disturb(0, LATE, bridged.containers[0], lambda x: undo.add(0, x))
    near, far = (bridged.socket(index, socket.SOCK_DGRAM) for index in (0, 1))
    assert send(near, far, 500) == list(range(500))
    near.sendto(b"last", far.getsockname())
    undo.heal(0)
    far.settimeout(PATIENCE_S)
    assert far.recv(16) == b"last"


def test_a_flow_keeps_its_order_while_it_is_healed(
    bridged: Bridged, links: Links, undo: Undo
) -> None:
    links.disturb(0, LATE, bridged.containers[0], lambda x: undo.add(0, x))
    near, far = (bridged.socket(index, socket.SOCK_DGRAM) for index in (0, 1))
    healed = threading.Event()

    def flow() -> None:
        number = 0
        while not healed.wait(0.001):
            near.sendto(number.to_bytes(4, "big"), far.getsockname())
            number += 1
        near.sendto((1 << 31).to_bytes(4, "big"), far.getsockname())

    sending = threading.Thread(target=flow)
    sending.start()
    arrived = [int.from_bytes(far.recv(16), "big")]
    undo.heal(0)
    healed.set()
    while arrived[-1] != 1 << 31:
        arrived.append(int.from_bytes(far.recv(16), "big"))
    sending.join()
    assert arrived == sorted(arrived)


def test_a_stream_still_carries_a_lot(bridged: Bridged, links: Links, undo: Undo) -> None:
    """No packet that waits counts against its sender."""
    links.disturb(0, LATE, bridged.containers[0], lambda x: undo.add(0, x))
    near, far = bridged.connect(0, 1)
    data = bytes(range(256)) * (32 << 10)
    sending = threading.Thread(target=near.sendall, args=(data,))
    begin = time.monotonic()
    sending.start()
    got = bytearray()
    while len(got) < len(data):
        got += far.recv(1 << 20)
    took_s = time.monotonic() - begin
    sending.join()
    assert got == data
    assert took_s < 20.0


def test_a_share_of_what_a_container_sends_is_lost_and_nothing_of_what_it_gets(
    bridged: Bridged, links: Links, undo: Undo
) -> None:
    links.disturb(0, LOSSY, bridged.containers[0], lambda x: undo.add(0, x))
    near, far = (bridged.socket(index, socket.SOCK_DGRAM) for index in (0, 1))
    arrived = send(near, far, 2000)
    # Six standard deviations of a fair draw.
    assert len(arrived) / 2000 == pytest.approx(0.7, abs=0.062)
    assert arrived == sorted(arrived)
    assert send(far, near, 500) == list(range(500))


def test_two_at_once_have_queues_of_their_own_and_both_delays_add_up(
    bridged: Bridged, links: Links, undo: Undo
) -> None:
    for index in (0, 1):
        links.disturb(index, LATE, bridged.containers[index], lambda x, i=index: undo.add(i, x))  # type: ignore[misc]
    assert queues() == 2
    assert 4 * DELAY_S <= bridged.rtt_s(0, 1) < 8 * DELAY_S
    undo.heal(0)
    assert 2 * DELAY_S <= bridged.rtt_s(0, 1) < 4 * DELAY_S


def test_healing_leaves_rules_of_others_alone(bridged: Bridged, links: Links, undo: Undo) -> None:
    theirs = ("iptables", "-t", "mangle", "-A", "FORWARD", "-j", "NFQUEUE", "--queue-num", "7")
    Host().run(*theirs, "--queue-bypass")
    before = rules()
    links.disturb(0, LATE, bridged.containers[0], lambda x: undo.add(0, x))
    assert len(rules()) > len(before)
    undo.heal(0)
    assert rules() == before
    Host().run(*(x.replace("-A", "-D") for x in theirs), "--queue-bypass")


def test_a_container_that_died_needs_no_healing(bridged: Bridged, links: Links, undo: Undo) -> None:
    links.disturb(0, LATE, bridged.containers[0], lambda x: undo.add(0, x))
    links.disturb(1, SLOW, bridged.containers[1], lambda x: undo.add(1, x))
    bridged.end(0)
    bridged.end(1)
    undo.heal(0)
    undo.heal(1)
    assert rules() == []


def test_rules_go_with_a_conductor_that_is_killed(bridged: Bridged) -> None:
    """It had no chance to heal anything."""
    program = f"""
import sys
from diloco_fleet.chaos.docker_links import LinkedContainer, Links
from tests.fleet.test_packet_delay_links import LATE, WithoutNetem
Links(WithoutNetem()).disturb(0, LATE, {bridged.containers[0]!r}, lambda undo: None)
print("begun", flush=True)
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as conductor:
        assert conductor.stdout is not None
        assert conductor.stdout.readline() == b"begun\n"
        assert rules()
        conductor.kill()
    until(lambda: not rules() and queues() == 0, "everything is as before")
    assert bridged.rtt_s(0, 1) < DELAY_S


def test_a_holder_that_is_killed_holds_nothing_up_and_is_noticed(
    bridged: Bridged, undo: Undo
) -> None:
    made: list[PacketDelay] = []

    def hold(*arguments: Any) -> PacketDelay:
        made.append(PacketDelay(*arguments))
        return made[-1]

    links = Links(WithoutNetem(), hold)
    links.disturb(0, LATE, bridged.containers[0], lambda x: undo.add(0, x))
    assert made[0].process is not None
    made[0].process.send_signal(signal.SIGKILL)
    until(lambda: queues() == 0, "it is dead")
    assert bridged.rtt_s(0, 1) < DELAY_S, "the rules let everything through"
    assert rules()
    undo.heal(0)
    assert rules() == []
    with pytest.raises(DilocoError, match="of learner-0 were not held to the end: exit code -9"):
        links.check(0)


def test_a_holder_that_cannot_begin_says_why_and_leaves_nothing(
    bridged: Bridged, links: Links, undo: Undo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("ip", "nsenter"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))
        with pytest.raises(DilocoError, match="of learner-0 cannot be held: iptables: "):
            links.disturb(0, LATE, bridged.containers[0], lambda x: undo.add(0, x))
        undo.heal(0)
    assert rules() == []
    assert queues() == 0


def test_a_rate_is_real_both_ways_and_not_put_over_somebody_elses(
    bridged: Bridged, links: Links, undo: Undo
) -> None:
    links.disturb(0, SLOW, bridged.containers[0], lambda x: undo.add(0, x))
    near, far = bridged.connect(0, 1)
    for sender, receiver in ((near, far), (far, near)):
        begin = time.monotonic()
        sending = threading.Thread(target=sender.sendall, args=(bytes(500_000),))
        sending.start()
        num_bytes = 0
        while num_bytes < 500_000:
            num_bytes += len(receiver.recv(1 << 16))
        sending.join()
        # 8 Mbit/s are 1 MB/s, after a burst of 32 kB.
        assert time.monotonic() - begin > 0.4
    with pytest.raises(DilocoError, match="eth0 of learner-0 is shaped already"):
        links.disturb(1, SLOW, bridged.containers[0], lambda x: undo.add(1, x))
    undo.heal(1)
    assert "tbf" in Host().run("tc", "qdisc", "show", "dev", "v0")
    undo.heal(0)
    assert "tbf" not in Host().run("tc", "qdisc", "show", "dev", "v0")


def test_a_queue_that_somebody_has_is_not_taken(bridged: Bridged) -> None:
    with packet_delay.bind(30_000) as one, packet_delay.bind(30_000) as other:
        assert (one.number, other.number) == (30_000, 30_001)


def test_a_container_in_the_network_of_the_host_is_refused(links: Links, bridged: Bridged) -> None:
    """Its links are everybody's."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        mine = LinkedContainer(name="learner-9", container_id="/", pid=process.pid, ipv6=False)
        with pytest.raises(DilocoError, match="learner-9 is in the network of the host"):
            links.disturb(0, SLOW, mine, lambda _: None)
    finally:
        process.kill()
        process.wait()
