"""Disturbs the links of containers: rates by tbf, delay and loss by netem or in user space."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from decoupled_diloco.errors import DilocoError, Reason
from diloco_fleet.chaos import packet_delay
from diloco_fleet.chaos.docker_host import Host
from diloco_fleet.chaos.packet_delay import READY, make_rules, remove_rules
from diloco_fleet.chaos.packet_queue import QUEUE_PACKETS
from diloco_fleet.chaos.scenario import Fault, FaultKind
from diloco_fleet.chaos.undo import Undoing

_BURST: Final = ("burst", "32kb", "latency", "400ms")
_LINK: Final = re.compile(r"^(\d+): ([^@:\s]+)@if(\d+):", re.MULTILINE)
_SHAPED: Final = re.compile(
    r"^qdisc (\S+) [0-9a-f]*[1-9a-f][0-9a-f]*: (dev \S+ )?root", re.MULTILINE
)
_BEGIN_S: Final = 20.0
_END_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedContainer:
    """A container whose links are disturbed.

    Attributes:
        name: in the scenario.
        container_id: of the engine.
        pid: of its first process, on the host.
        ipv6: whether it has addresses of IPv6.
    """

    name: str
    container_id: str
    pid: int
    ipv6: bool

    def inside(self, *command: str) -> list[str]:
        """The command that does something in its network."""
        return ["nsenter", "--target", str(self.pid), "--net", *command]


@dataclass(frozen=True, slots=True)
class Link:
    """A link of a container: the names of its two ends."""

    inside: str
    outside: str


class Held(Protocol):
    """Packets that somebody holds; see `PacketDelay`."""

    problem: str

    def begin(self) -> None:
        """Begins to hold them."""

    def end(self) -> None:
        """Ends it; again and again where that fails."""


Hold = Callable[[Host, LinkedContainer, Sequence[Link], Fault], Held]


class Links:
    """Disturbs links of containers, and knows what undoes it.

    Args:
        host: where the containers are.
        hold: holds packets where the kernel cannot by itself.
    """

    def __init__(self, host: Host, hold: Hold | None = None) -> None:
        self._host = host
        self._hold: Hold = PacketDelay if hold is None else hold
        self._held: dict[int, list[Held]] = {}

    def refusal(self, fault: Fault) -> str:
        """Says why a link cannot be disturbed like that; empty where it can."""
        why = self._host.refusal(*discipline(fault))
        if not why or fault.fault is FaultKind.BANDWIDTH:
            return why
        other = packet_delay.refusal(self._host)
        same = other.partition(":")[0] == why.partition(":")[0]
        return f"{why}; {other}" if other and not same else other

    def disturb(
        self,
        number: int,
        fault: Fault,
        container: LinkedContainer,
        keep: Callable[[Undoing], None],
    ) -> None:
        """Disturbs every link of a container.

        Args:
            number: of the strike.
            fault: how.
            container: whose links.
            keep: takes what undoes something, before that is done.

        Raises:
            DilocoError: FAULT_IMPOSSIBLE.
        """
        links = self._links(container)
        how = discipline(fault)
        if fault.fault is not FaultKind.BANDWIDTH and self._host.refusal(*how):
            held = self._hold(self._host, container, links, fault)
            self._held.setdefault(number, []).append(held)
            keep(held.end)
            held.begin()
            return
        for link in links:
            self._shape(container, container.inside(), link.inside, how, keep)
            if goes_both_ways(fault):
                self._shape(container, [], link.outside, how, keep)

    def check(self, number: int) -> None:
        """Looks whether a fault that is over was done to its end.

        Raises:
            DilocoError: FAULT_IMPOSSIBLE where it was not.
        """
        problems = [held.problem for held in self._held.pop(number, []) if held.problem]
        if problems:
            raise DilocoError(Reason.FAULT_IMPOSSIBLE, "; ".join(problems))

    def _links(self, container: LinkedContainer) -> list[Link]:
        name = container.name
        if self._host.shares_network(container.pid):
            raise _impossible(f"{name} is in the network of the host; give it one of its own")
        text = self._host.run(*container.inside("ip", "-o", "link"))
        ends = {
            (index, peer): device
            for index, device, peer in _LINK.findall(self._host.run("ip", "-o", "link"))
        }
        found = []
        for index, device, peer in _LINK.findall(text):
            if (peer, index) not in ends:
                raise _impossible(f"the other end of {device} of {name} is not on this host")
            found.append(Link(inside=device, outside=ends[peer, index]))
        if not found:
            raise _impossible(f"{name} has no link now")
        return found

    def _shape(
        self,
        container: LinkedContainer,
        prefix: Sequence[str],
        device: str,
        how: Sequence[str],
        keep: Callable[[Undoing], None],
    ) -> None:
        def is_shaped() -> bool:
            try:
                shown = self._host.run(*prefix, "tc", "qdisc", "show", "dev", device)
            except DilocoError as error:
                if "Cannot find device" in error.message:
                    return False
                raise
            return _SHAPED.search(shown) is not None

        def undo() -> None:
            # A container that was started again has new links, undisturbed.
            if self._host.owns(container.pid, container.container_id) and is_shaped():
                self._host.run(*prefix, "tc", "qdisc", "del", "dev", device, "root")

        if is_shaped():
            raise _impossible(
                f"{device} of {container.name} is shaped already, by somebody else; end that first"
            )
        keep(undo)
        self._host.run(*prefix, "tc", "qdisc", "add", "dev", device, "root", *how)


class PacketDelay:
    """Holds packets of a container in a process of its own: see `packet_delay`.

    Args:
        host: this machine.
        container: whose packets.
        links: its links.
        fault: how they are disturbed.

    Attributes:
        problem: why it did not last until its end; empty where it did.
        process: while there is one.
    """

    def __init__(
        self, host: Host, container: LinkedContainer, links: Sequence[Link], fault: Fault
    ) -> None:
        self.problem = ""
        self._host = host
        self._name = container.name
        self._both = goes_both_ways(fault)
        self._ipv6 = container.ipv6
        self._devices = [link.outside for link in links]
        self._command = [
            *(sys.executable, "-m", packet_delay.__name__),
            *("--delay-s", str(fault.delay_s or 0.0), "--share", str(fault.share or 0.0)),
            *(["--both"] if self._both else []),
            *(["--ipv6"] if self._ipv6 else []),
            *self._devices,
        ]
        self.process: subprocess.Popen[bytes] | None = None
        self._said = b""

    def begin(self) -> None:
        """Starts the process; returns once packets are held.

        Raises:
            DilocoError: FAULT_IMPOSSIBLE, with its words.
        """
        # A session of its own: Ctrl-C is for who heals, and that ends this, too.
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        give_up = time.monotonic() + _BEGIN_S
        output = self.process.stdout
        assert output is not None, "a pipe"
        while f"\n{READY}\n".encode() not in self._said:
            wait_s = max(give_up - time.monotonic(), 0.0)
            if not select.select([output], [], [], wait_s)[0]:
                raise _impossible(f"packets of {self._name} are not held within {_BEGIN_S:g} s")
            said = os.read(output.fileno(), 1024)
            if not said:
                raise _impossible(f"packets of {self._name} cannot be held: {self._last_words()}")
            self._said += said

    def end(self) -> None:
        """Ends the process, and what it may have left behind.

        Raises:
            DilocoError: FAULT_IMPOSSIBLE where its rules cannot be removed.
        """
        process = self.process
        if process is None:
            return
        if process.returncode is None and process.poll() is not None:
            self.problem = f"packets of {self._name} were not held to the end: {self._last_words()}"
        self._end(process)
        # Killed, it could not remove its rules itself.
        queue = self._said.partition(b"\n")[0]
        if process.returncode != 0 and queue.isdigit():
            rules = make_rules(int(queue), self._devices, both=self._both, ipv6=self._ipv6)
            remove_rules(self._host, rules)
        self.process = None

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        try:
            process.communicate(timeout=_END_S)  # closes its standard input
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    def _last_words(self) -> str:
        assert self.process is not None, "it was started"
        assert self.process.stderr is not None, "a pipe"
        said = self.process.stderr.read().decode(errors="replace").split("\n")
        self.process.wait()
        return next(
            (line for line in reversed(said) if line), f"exit code {self.process.returncode}"
        )


def discipline(fault: Fault) -> list[str]:
    """How links are disturbed, as ``tc`` takes it."""
    if fault.mbit_per_s is not None:
        return ["tbf", "rate", f"{max(round(fault.mbit_per_s * 1000), 1)}kbit", *_BURST]
    limit = ("limit", str(QUEUE_PACKETS))
    if fault.delay_s is not None:
        return ["netem", *limit, "delay", f"{fault.delay_s * 1000:g}ms"]
    assert fault.share is not None, "checked by the scenario"
    return ["netem", *limit, "loss", f"{fault.share * 100:g}%"]


def goes_both_ways(fault: Fault) -> bool:
    """Whether it strikes what comes to a container, too, and not only what it sends."""
    return fault.fault is not FaultKind.LOSS


def _impossible(why: str) -> DilocoError:
    return DilocoError(Reason.FAULT_IMPOSSIBLE, why)
