"""Delays or loses packets of links of this machine's bridges, where the kernel has no netem.

``python -m diloco_fleet.chaos.packet_delay --delay-s 0.05 --both veth1a2b3c`` binds a queue, puts
rules for these links into iptables, and lets each packet go when its time has come, until its
standard input is closed: then the rules are gone, and what was held is on its way. Its parent holds
the other end, so that it ends with it, however that ends. Where this process itself is killed, the
rules let everything through, and whoever started it takes them away.

The rules are where a bridge passes packets on, not where a sender puts them out: there a packet
that waits counts against its socket, which sends no more.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from decoupled_diloco.errors import DilocoError
from diloco_fleet.chaos.docker_host import Host, missing_right
from diloco_fleet.chaos.packet_queue import PacketQueue

READY: Final = "ready"
"""The line that follows the number of the queue, once the rules are in place."""

_QUEUES: Final = range(20_000, 60_000)
_TRIES: Final = 100
_LOCK_S: Final = 10
_BRIDGES: Final = Path("/proc/sys/net/bridge")
_IPV4, _IPV6 = "iptables", "ip6tables"


class DelayLine:
    """What becomes of packets, and when: each waits equally long, so their order is kept. Pure.

    Args:
        delay_s: from the arrival of a packet until it goes.
        share: of the packets, how many are lost.
    """

    def __init__(self, *, delay_s: float, share: float) -> None:
        self._delay_s = delay_s
        self._share = share
        self._held: deque[tuple[float, int]] = deque()

    def take(self, packet: int, now_s: float, chance: float) -> bool:
        """Takes a packet that has arrived; returns False where it is lost.

        Args:
            packet: its number.
            now_s: the time.
            chance: from 0 to below 1, drawn for it.
        """
        if chance < self._share:
            return False
        self._held.append((now_s + self._delay_s, packet))
        return True

    def due(self, now_s: float) -> int | None:
        """The last packet that goes now, with all before it; None where none does."""
        last = None
        while self._held and self._held[0][0] <= now_s:
            last = self._held.popleft()[1]
        return last

    def wait_s(self, now_s: float) -> float | None:
        """How long until one goes; None where none waits."""
        return max(self._held[0][0] - now_s, 0.0) if self._held else None

    def release(self) -> int | None:
        """The last packet that waits; all go at once."""
        last = self._held[-1][1] if self._held else None
        self._held.clear()
        return last


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule that hands packets of a link to a queue.

    Attributes:
        program: iptables of the packets' protocol.
        chain: where it stands.
        match: which packets.
        queue: whose they are; without a listener they pass.
    """

    program: str
    chain: str
    match: tuple[str, ...]
    queue: int

    def command(self, action: str) -> list[str]:
        """The command that appends (``--append``), checks or deletes exactly this rule."""
        where = (self.program, "--wait", str(_LOCK_S), "--table", "mangle", action, self.chain)
        bridged = ("-m", "physdev", "--physdev-is-bridged", *self.match)
        target = ("-j", "NFQUEUE", "--queue-num", str(self.queue), "--queue-bypass")
        return [*where, *bridged, *target]


def make_rules(queue: int, devices: Iterable[str], *, both: bool, ipv6: bool) -> list[Rule]:
    """The rules for what containers send each other.

    Args:
        queue: its number.
        devices: of bridges, each the host's end of a container's link.
        both: also what comes to these containers, not only what they send.
        ipv6: the same for IPv6.
    """
    # Each way has a chain of its own: an accepted packet skips the rest of the one it was in, and
    # must not skip the rules of another container to which it goes.
    return [
        Rule(program=program, chain=chain, match=(flag, device), queue=queue)
        for program in ((_IPV4, _IPV6) if ipv6 else (_IPV4,))
        for device in devices
        for chain, flag in (
            ("FORWARD", "--physdev-in"),
            *([("POSTROUTING", "--physdev-out")] if both else []),
        )
    ]


def remove_rules(host: Host, rules: Iterable[Rule]) -> None:
    """Takes exactly these rules away, as far as they are there.

    Raises:
        DilocoError: FAULT_IMPOSSIBLE where one is there and cannot be removed.
    """
    for rule in rules:
        try:
            host.run(*rule.command("--check"))
        except DilocoError:
            continue
        host.run(*rule.command("--delete"))


def refusal(host: Host) -> str:
    """Says why packets cannot be held here; empty where they can. Changes nothing."""
    why = host.refusal() or host.missing("nsenter", "unshare", "ip", _IPV4)
    if why:
        return why
    switch = _BRIDGES / "bridge-nf-call-iptables"
    if not switch.exists():
        return "the kernel of the host has no br_netfilter, so bridged packets pass no rule"
    if switch.read_text(encoding="ascii").strip() == "0":
        return "bridged packets pass no rule; set net.bridge.bridge-nf-call-iptables=1"
    try:
        for rule in make_rules(_QUEUES[0], ["probe"], both=True, ipv6=False):
            host.run("unshare", "--net", *rule.command("--append"))
    except DilocoError as error:
        lacking = f"the host has no NFQUEUE or no physdev for iptables: {error.message}"
        return missing_right(error) or lacking
    try:
        with bind(random.choice(_QUEUES)):
            return ""
    except OSError as error:
        return f"the kernel of the host gives no queue of packets (NFQUEUE): {error.strerror}"


def bind(first: int) -> PacketQueue:
    """The first queue from a number on that nobody has.

    Raises:
        OSError: why there is none.
    """
    for number in range(first, first + _TRIES - 1):
        try:
            return PacketQueue(number)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return PacketQueue(first + _TRIES - 1)


def main(arguments: Sequence[str]) -> int:
    """Holds packets until the standard input is closed; returns the exit code."""
    options = _parse(arguments)
    line = DelayLine(delay_s=options.delay_s, share=options.share)
    host, rules = Host(), list[Rule]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with bind(random.choice(_QUEUES)) as queue:
            _say(str(queue.number))
            rules += make_rules(queue.number, options.device, both=options.both, ipv6=options.ipv6)
            for rule in rules:
                host.run(*rule.command("--append"))
            _say(READY)
            _serve(queue, line)
    except DilocoError as error:
        return _failed(error.message)
    except OSError as error:
        return _failed(f"packets cannot be held: {error.strerror}")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Nobody listens any more: until they are gone, the rules let everything through.
        remove_rules(host, rules)
    return 0


def _serve(queue: PacketQueue, line: DelayLine) -> None:
    """Lets packets go when their time has come; at the end, all of them."""
    try:
        while True:
            ready, _, _ = select.select([queue, sys.stdin], [], [], line.wait_s(time.monotonic()))
            if sys.stdin in ready:
                return  # nobody writes: it was closed
            now_s = time.monotonic()
            for packet in queue.arrived() if ready else []:
                if not line.take(packet, now_s, random.random()):
                    queue.drop(packet)
            _accept(queue, line.due(now_s))
    finally:
        for packet in queue.arrived():
            line.take(packet, time.monotonic(), 1.0)
        _accept(queue, line.release())


def _accept(queue: PacketQueue, last: int | None) -> None:
    if last is not None:
        queue.accept_up_to(last)


def _failed(why: str) -> int:
    sys.stderr.write(f"{why}\n")
    return 1


def _say(text: str) -> None:
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="packet_delay", description=__doc__)
    parser.add_argument("--delay-s", type=float, default=0.0, help="how long each packet waits")
    parser.add_argument(
        "--share", type=float, default=0.0, help="of the packets, how many are lost"
    )
    parser.add_argument("--both", action="store_true", help="also what comes to the containers")
    parser.add_argument("--ipv6", action="store_true", help="also IPv6")
    parser.add_argument("device", nargs="+", help="the host's end of a container's link")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
