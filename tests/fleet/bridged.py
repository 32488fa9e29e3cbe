"""Containers as the network knows them: processes with a network of their own, links, a bridge.

All of it is in a network namespace of its own, which the calling thread enters: nothing of the
machine's is touched, and everything is gone with the processes.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from diloco_fleet.chaos.docker_host import Host
from diloco_fleet.chaos.docker_links import LinkedContainer

_CLONE_NEWNET = 0x40000000
PATIENCE_S = 30.0


def _call(function: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), function)


@contextmanager
def network_of(pid: int | None) -> Iterator[None]:
    """The network of a process, or a new one; sockets that are opened here stay in it."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if pid is None:
            _call("unshare", _CLONE_NEWNET)
        else:
            there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
            try:
                _call("setns", there, _CLONE_NEWNET)
            finally:
                os.close(there)
        try:
            yield
        finally:
            _call("setns", before, _CLONE_NEWNET)
    finally:
        os.close(before)


class Bridged:
    """A bridge with containers, in the network of this thread.

    Attributes:
        containers: each called ``learner-0`` and so on, at 10.9.0.10 and fd09::10 and so on, with
            the host's end ``v0``.
        ipv6: whether there is IPv6 here.
    """

    def __init__(self, stack: ExitStack, num_containers: int) -> None:
        self._stack = stack
        self._host = Host()
        self._host.run("ip", "link", "set", "lo", "up")
        self._host.run("ip", "link", "add", "bridge", "type", "bridge")
        self._host.run("ip", "address", "add", "10.9.0.1/24", "dev", "bridge")
        self._host.run("ip", "link", "set", "bridge", "up")
        self.ipv6 = Path("/proc/sys/net/ipv6").exists()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.containers = [self._container(index) for index in range(num_containers)]

    def _container(self, index: int) -> LinkedContainer:
        process = subprocess.Popen(["unshare", "--net", "sleep", "600"])
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self._processes.append(process)
        # Until it has become another program, its network is that of this thread.
        give_up = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{process.pid}/comm").read_text().strip() != "sleep":
            assert time.monotonic() < give_up
            time.sleep(0.005)
        made = LinkedContainer(
            name=f"learner-{index}", container_id="/", pid=process.pid, ipv6=self.ipv6
        )
        veth = ("ip", "link", "add", f"v{index}", "type", "veth", "peer", "name", "eth0")
        self._host.run(*veth, "netns", str(process.pid))
        self._host.run("ip", "link", "set", f"v{index}", "master", "bridge", "up")
        add = made.inside("ip", "address", "add", "dev", "eth0")
        self._host.run(*add, f"{self.address(index)}/24")
        if self.ipv6:
            self._host.run(*add, f"{self.address(index, ipv6=True)}/64", "nodad")
        self._host.run(*made.inside("ip", "link", "set", "eth0", "up"))
        return made

    @staticmethod
    def address(index: int | None, *, ipv6: bool = False) -> str:
        """Address of a container; of the host for None."""
        return f"{'fd09::' if ipv6 else '10.9.0.'}{1 if index is None else 10 + index}"

    def end(self, index: int) -> None:
        """A container dies; its links go with it."""
        self._processes[index].kill()
        self._processes[index].wait(PATIENCE_S)

    def socket(
        self, index: int | None, kind: socket.SocketKind, *, ipv6: bool = False
    ) -> socket.socket:
        """A socket of a container, bound to its address; of the host for None."""
        with ExitStack() as stack:
            if index is not None:
                stack.enter_context(network_of(self.containers[index].pid))
            made = socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, kind)
            self._stack.callback(made.close)
            made.settimeout(PATIENCE_S)
            made.bind((self.address(index, ipv6=ipv6), 0))
            return made

    def rtt_s(self, one: int | None, other: int | None, *, ipv6: bool = False) -> float:
        """The shortest of some round trips of a datagram."""
        near, far = (self.socket(x, socket.SOCK_DGRAM, ipv6=ipv6) for x in (one, other))
        times = []
        for _ in range(5):
            begin = time.monotonic()
            near.sendto(b"x", far.getsockname())
            _, sender = far.recvfrom(16)
            far.sendto(b"x", sender)
            near.recv(16)
            times.append(time.monotonic() - begin)
        return min(times)

    def connect(self, one: int, other: int) -> tuple[socket.socket, socket.socket]:
        """A connection from one container to another one: both ends."""
        listener = self.socket(other, socket.SOCK_STREAM)
        listener.listen()
        near = self.socket(one, socket.SOCK_STREAM)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        self._stack.callback(far.close)
        far.settimeout(PATIENCE_S)
        return near, far
