"""Links of containers: how they are disturbed, what is refused, what is undone despite errors."""

from __future__ import annotations

from typing import Any, cast

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from diloco_fleet.chaos import docker_host, packet_delay
from diloco_fleet.chaos.docker_host import Host
from diloco_fleet.chaos.docker_injector import DockerInjector
from diloco_fleet.chaos.docker_links import Links, discipline
from diloco_fleet.chaos.scenario import Fault, FaultKind
from tests.fleet.fake_engine import (
    ANYONE,
    LATE,
    PROJECT,
    SLOW,
    FakeEngine,
    FakeHold,
    FakeHost,
    strike,
)

LOSSY = Fault(fault=FaultKind.LOSS, share=0.05, **ANYONE)


def test_links_of_a_container_that_began_anew_need_no_healing(
    engine: FakeEngine, injector: DockerInjector
) -> None:
    strike(injector, SLOW, "learner-0")
    engine.by_service("learner").start()
    injector.heal(0)
    assert injector.heal_all() == []


def test_a_limit_of_bandwidth_is_put_on_both_ends_and_loss_on_one(
    host: FakeHost, injector: DockerInjector
) -> None:
    strike(injector, SLOW, "learner-0")
    assert host.shaped == dict.fromkeys(
        ("eth0", "veth9"), "tbf rate 10000kbit burst 32kb latency 400ms"
    )
    injector.heal(0)
    strike(injector, LOSSY, "learner-0", 1)
    assert host.shaped == {"eth0": "netem limit 20000 loss 5%"}


def test_without_netem_packets_are_held_in_user_space(
    engine: FakeEngine, host: FakeHost, injector: DockerInjector
) -> None:
    host.without = {"netem"}
    networks = engine.by_service("learner-b").networks
    networks["dc-b"]["GlobalIPv6Address"] = "fd00::2"
    for number, (fault, name, how) in enumerate(
        ((LATE, "learner-0", "latency 0.1 IPv4"), (LOSSY, "learner-2", "loss 0.05 IPv46"))
    ):
        strike(injector, fault, name, number)
        assert host.shaped == {"veth9": how}
        injector.heal(number)
        assert not host.shaped


def test_packets_that_were_not_held_to_the_end_are_reported_and_nothing_is_left(
    engine: FakeEngine, host: FakeHost
) -> None:
    class Broken(FakeHold):
        def end(self) -> None:
            super().end()
            self.problem = "packets of learner-0 were not held to the end: exit code -9"

    host.without = {"netem"}
    injector = DockerInjector(cast("Any", engine), PROJECT, host, Links(host, Broken))
    strike(injector, LATE, "learner-0")
    with pytest.raises(DilocoError, match="not held to the end"):
        injector.heal(0)
    assert not host.shaped
    assert injector.heal_all() == []


def test_what_was_done_before_an_error_is_undone(host: FakeHost, injector: DockerInjector) -> None:
    host.failing = {"veth9"}
    with pytest.raises(DilocoError, match="veth9 says no"):
        strike(injector, SLOW, "learner-0")
    assert set(host.shaped) == {"eth0"}
    assert injector.heal_all() == []
    assert not host.shaped


def test_limits_of_somebody_else_are_neither_replaced_nor_removed(
    host: FakeHost, injector: DockerInjector
) -> None:
    host.shaped["eth0"] = "tbf of an overlay"
    with pytest.raises(DilocoError, match="eth0 of learner-0 is shaped already"):
        strike(injector, SLOW, "learner-0")
    assert injector.heal_all() == []
    assert host.shaped == {"eth0": "tbf of an overlay"}


@pytest.mark.parametrize(
    ("inside", "words"),
    [("12: eth0@if7: <UP>", "the other end of eth0 of learner-0"), ("1: lo: <UP>", "has no link")],
)
def test_links_that_do_not_end_on_this_host_are_not_taken_for_others(
    engine: FakeEngine, inside: str, words: str
) -> None:
    """Interface 7 of the host is another one: its other end is not interface 12."""

    class Elsewhere(FakeHost):
        def run(self, *command: str) -> str:
            if "link" in command and "nsenter" in command:
                return f"{inside}\n"
            return "7: veth3@if40: <UP>\n" if "link" in command else super().run(*command)

    host = Elsewhere(engine)
    injector = DockerInjector(cast("Any", engine), PROJECT, host)
    with pytest.raises(DilocoError, match=words):
        strike(injector, SLOW, "learner-0")
    assert not host.shaped


@pytest.mark.parametrize("fault", [LATE, LOSSY], ids=lambda x: str(x.fault))
def test_delay_and_loss_are_refused_only_where_neither_kernel_nor_queue_does_them(
    host: FakeHost, injector: DockerInjector, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(packet_delay, "refusal", lambda _: "no br_netfilter")
    assert injector.refusal(fault) == ""
    host.without = {"netem", "tbf"}
    assert injector.refusal(fault) == "the kernel of the host has no netem; no br_netfilter"
    monkeypatch.setattr(packet_delay, "refusal", lambda _: "")
    assert injector.refusal(fault) == ""
    assert injector.refusal(SLOW) == "the kernel of the host has no tbf"
    host.why_not = "NET_ADMIN is missing: tc says no"
    monkeypatch.setattr(packet_delay, "refusal", lambda _: "NET_ADMIN is missing: iptables says no")
    assert injector.refusal(fault).count("NET_ADMIN") == 1


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("RTNETLINK answers: Operation not permitted", "NET_ADMIN is missing"),
        ("iptables: Permission denied (you must be root)", "NET_ADMIN is missing"),
        ("unshare failed: Operation not permitted", "SYS_ADMIN is missing"),
        ("Error: Specified qdisc kind is unknown.", "the kernel of the host has no netem"),
    ],
)
def test_the_host_says_why_it_cannot_shape(
    monkeypatch: pytest.MonkeyPatch, said: str, words: str
) -> None:
    class Refusing(Host):
        def run(self, *command: str) -> str:
            raise DilocoError(Reason.FAULT_IMPOSSIBLE, f"{command[0]}: {said}")

    monkeypatch.setattr(docker_host.shutil, "which", lambda name: f"/usr/sbin/{name}")
    monkeypatch.setattr(docker_host.os, "geteuid", lambda: 0)
    assert words in Refusing().refusal(*discipline(LATE))
    monkeypatch.setattr(docker_host.os, "geteuid", lambda: 1000)
    assert "root" in Refusing().refusal()


def test_disciplines_as_tc_takes_them() -> None:
    assert discipline(SLOW)[:3] == ["tbf", "rate", "10000kbit"]
    assert discipline(LATE) == ["netem", "limit", "20000", "delay", "100ms"]
    assert discipline(LOSSY) == ["netem", "limit", "20000", "loss", "5%"]
