"""Packets that wait in user space: what is said to the kernel and heard of it, who goes when."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.errors import DilocoError, Reason
from diloco_fleet.chaos import docker_host, packet_delay
from diloco_fleet.chaos.docker_host import Host
from diloco_fleet.chaos.packet_delay import DelayLine, make_rules, remove_rules
from diloco_fleet.chaos.packet_queue import (
    Answer,
    Arrived,
    decode,
    encode_accept_up_to,
    encode_drop,
    encode_setup,
)


def packet(number: int, *, before: bytes = b"") -> bytes:
    """A message of the kernel about a packet, with attributes before the one that counts."""
    header = struct.pack("!IHB", number, 0x0800, 2)
    body = struct.pack("!BBH", 2, 0, 77) + before
    body += struct.pack("=HH", 4 + len(header), 1) + header + b"\0"
    return struct.pack("=IHHII", 16 + len(body), 3 << 8, 0, 0, 0) + body


def answer(sequence: int, code: int) -> bytes:
    """A message of the kernel that answers another one."""
    body = struct.pack("=i", -code) + bytes(16)
    return struct.pack("=IHHII", 16 + len(body), 2, 0, sequence, 0) + body


# -- messages -------------------------------------------------------------------------------------


def test_messages_are_those_of_the_kernel_byte_for_byte() -> None:
    """As libnetfilter_queue writes them, on a little-endian machine."""
    assert encode_drop(77, 259) == bytes.fromhex(
        "20000000" "0103" "0100" "00000000" "00000000" "0000004d" "0c000200" "00000000" "00000103"
    )  # fmt: skip
    assert encode_accept_up_to(77, 259) == bytes.fromhex(
        "20000000" "0303" "0100" "00000000" "00000000" "0000004d" "0c000200" "00000001" "00000103"
    )  # fmt: skip
    bind, length, flags, copy = encode_setup(77)
    header = "02030500"
    assert bind == bytes.fromhex(
        f"1c000000 {header} 01000000 00000000 0000004d 08000100 01000000"
    )  # fmt: skip
    assert length == bytes.fromhex(
        f"1c000000 {header} 02000000 00000000 0000004d 08000300 00004e20"
    )  # fmt: skip
    assert flags == bytes.fromhex(
        f"24000000 {header} 03000000 00000000 0000004d 08000500 00000004 08000400 00000004"
    )  # fmt: skip
    assert copy == bytes.fromhex(
        f"20000000 {header} 04000000 00000000 0000004d 09000200 00000000 01000000"
    )  # fmt: skip


def test_packets_and_answers_are_read_in_their_order() -> None:
    mark = struct.pack("=HHI", 8, 3, 5)
    datagram = packet(7) + answer(3, 0) + packet((1 << 32) - 1, before=mark) + answer(0, 2)
    assert list(decode(datagram)) == [
        Arrived(packet=7), Answer(sequence=3, code=0),
        Arrived(packet=(1 << 32) - 1), Answer(sequence=0, code=2),
    ]  # fmt: skip


def test_a_message_of_another_kind_is_passed_over() -> None:
    other = struct.pack("=IHHII", 16, 1 << 8, 0, 0, 0)
    assert list(decode(other + packet(1))) == [Arrived(packet=1)]


@pytest.mark.parametrize(
    "datagram",
    [
        b"\x01",
        packet(1)[:-4],
        struct.pack("=IHHII", 8, 3 << 8, 0, 0, 0),
        struct.pack("=IHHII", 20, 3 << 8, 0, 0, 0) + bytes(4),
        struct.pack("=IHHII", 18, 2, 0, 0, 0) + bytes(2),
        packet(1, before=struct.pack("=HH", 2, 5)),
        packet(1, before=struct.pack("=HH", 200, 5)),
    ],
    ids=["header", "cut", "size", "no-number", "no-code", "small-attribute", "large-attribute"],
)
def test_what_is_no_message_is_an_error_and_ends(datagram: bytes) -> None:
    with pytest.raises(ValueError, match=r"message|packet|answer|attribute"):
        list(decode(datagram))


@given(st.binary(max_size=200))
def test_whatever_comes_is_read_to_its_end_or_refused(datagram: bytes) -> None:
    with suppress(ValueError):
        assert len(list(decode(datagram))) <= len(datagram) // 16 + 1


# -- who goes when --------------------------------------------------------------------------------


@given(
    delay_s=st.floats(0.0, 60.0),
    share=st.floats(0.0, 0.9),
    gaps=st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 1.0, exclude_max=True))),
)
def test_every_packet_goes_once_in_order_and_never_early(
    delay_s: float, share: float, gaps: list[tuple[float, float]]
) -> None:
    """Or is lost; and the line asks to be looked at no later than the next one is due."""
    line = DelayLine(delay_s=delay_s, share=share)
    now_s, arrivals, went = 0.0, dict[int, float](), list[int]()

    def look() -> None:
        last = line.due(now_s)
        if last is not None:
            leaving = [x for x in arrivals if x <= last and x not in went]
            assert leaving
            assert leaving[-1] == last
            assert all(now_s >= arrivals[x] + delay_s for x in leaving)
            went.extend(leaving)
        wait_s = line.wait_s(now_s)
        waiting = [x for x in arrivals if x not in went]
        assert (wait_s is None) == (not waiting)
        if wait_s is not None:
            assert 0.0 < wait_s <= delay_s + 1e-6

    for packet_number, (gap_s, chance) in enumerate(gaps):
        now_s += gap_s
        if line.take(packet_number, now_s, chance):
            assert chance >= share
            arrivals[packet_number] = now_s
        else:
            assert chance < share
        look()
    last = line.release()
    assert last == next((x for x in reversed(arrivals) if x not in went), None)
    assert went == sorted(went)
    assert line.wait_s(now_s) is None


def test_packets_wait_as_long_as_is_asked_for() -> None:
    line = DelayLine(delay_s=0.5, share=0.0)
    assert line.wait_s(10.0) is None
    assert line.take(1, 10.0, 0.0)
    assert line.take(2, 10.25, 0.0)
    assert line.wait_s(10.25) == 0.25
    assert line.due(10.25) is None
    assert line.due(10.5) == 1
    assert line.due(20.0) == 2
    assert line.due(20.0) is None


# -- rules ----------------------------------------------------------------------------------------


class Recording(Host):
    """A host that runs nothing; programs in ``failing`` fail."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.commands: list[str] = []

    def run(self, *command: str) -> str:
        self.commands.append(" ".join(command))
        if any(word in self.commands[-1] for word in self.failing):
            raise DilocoError(Reason.FAULT_IMPOSSIBLE, f"{command[0]}: it says no")
        return ""


def test_rules_stand_where_a_bridge_passes_packets_on() -> None:
    """Each way in a chain of its own: what one fault lets go may be another one's, too."""
    rules = make_rules(77, ["veth1"], both=True, ipv6=False)
    assert [" ".join(rule.command("--append")) for rule in rules] == [
        "iptables --wait 10 --table mangle --append FORWARD -m physdev --physdev-is-bridged "
        "--physdev-in veth1 -j NFQUEUE --queue-num 77 --queue-bypass",
        "iptables --wait 10 --table mangle --append POSTROUTING -m physdev --physdev-is-bridged "
        "--physdev-out veth1 -j NFQUEUE --queue-num 77 --queue-bypass",
    ]
    one_way = make_rules(77, ["veth1", "veth2"], both=False, ipv6=True)
    assert [(rule.program, rule.chain, rule.match[1]) for rule in one_way] == [
        ("iptables", "FORWARD", "veth1"), ("iptables", "FORWARD", "veth2"),
        ("ip6tables", "FORWARD", "veth1"), ("ip6tables", "FORWARD", "veth2"),
    ]  # fmt: skip


def test_a_rule_that_is_not_there_is_not_deleted_and_one_that_stays_is_an_error() -> None:
    rules = make_rules(77, ["veth1"], both=True, ipv6=False)
    host = Recording("--check FORWARD")
    remove_rules(host, rules)
    assert ["--delete" in command for command in host.commands] == [False, False, True]
    with pytest.raises(DilocoError, match="it says no"):
        remove_rules(Recording("--delete"), rules)


# -- refusals -------------------------------------------------------------------------------------


@pytest.fixture
def bridges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which packets can be held, by what can be seen of it."""
    monkeypatch.setattr(docker_host.os, "geteuid", lambda: 0)
    monkeypatch.setattr(docker_host.shutil, "which", lambda name: f"/usr/sbin/{name}")
    monkeypatch.setattr(packet_delay, "_BRIDGES", tmp_path)
    monkeypatch.setattr(packet_delay, "PacketQueue", FakeQueue)
    (tmp_path / "bridge-nf-call-iptables").write_text("1\n")
    return tmp_path


class FakeQueue:
    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> FakeQueue:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_where_everything_is_there_it_can_be_done(bridges: Path) -> None:
    assert packet_delay.refusal(Recording()) == ""


@pytest.mark.parametrize("failing", [("iptables",), ()])
def test_the_reason_is_named_where_it_cannot_be_done(
    bridges: Path, monkeypatch: pytest.MonkeyPatch, failing: Sequence[str]
) -> None:
    def no_queue(number: int) -> Any:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(packet_delay, "PacketQueue", no_queue)
    why = packet_delay.refusal(Recording(*failing))
    assert ("no physdev for iptables: unshare: it says no" in why) is bool(failing)
    assert ("no queue of packets (NFQUEUE): Operation not permitted" in why) is not bool(failing)


def test_a_kernel_whose_bridges_pass_no_rules_is_refused(bridges: Path) -> None:
    switch = bridges / "bridge-nf-call-iptables"
    switch.write_text("0\n")
    assert "net.bridge.bridge-nf-call-iptables=1" in packet_delay.refusal(Recording())
    switch.unlink()
    assert "no br_netfilter" in packet_delay.refusal(Recording())


def test_programs_and_rights_that_are_missing_are_named(
    bridges: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def which(name: str) -> str | None:
        return None if name == "iptables" else name

    monkeypatch.setattr(docker_host.shutil, "which", which)
    assert "the program iptables" in packet_delay.refusal(Recording())
    monkeypatch.setattr(docker_host.os, "geteuid", lambda: 1000)
    assert "root" in packet_delay.refusal(Recording())
