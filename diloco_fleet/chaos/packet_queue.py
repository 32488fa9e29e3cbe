"""Packets that the kernel holds in a queue (NFQUEUE) until this process says what becomes of them.

Messages of the kernel and to it are pure values; `PacketQueue` is the socket that carries them. Of
a packet only its number is asked for: nothing of it is read.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

QUEUE_PACKETS: Final = 20_000
"""Packets that a queue holds at most; the kernel drops what is more."""

_NETLINK_NETFILTER: Final = 12
_SOL_NETLINK: Final = 270
_NETLINK_NO_ENOBUFS: Final = 5
_SO_RCVBUFFORCE: Final = 33
_RECEIVE_BYTES: Final = 8 << 20
_DATAGRAM_BYTES: Final = 1 << 13
_DATAGRAMS: Final = 256
"""Most that are read at once."""

_QUEUES: Final = Path("/proc/thread-self/net/netfilter/nfnetlink_queue")
_ANSWER_S: Final = 5.0

_REQUEST: Final = 1
_ACKNOWLEDGE: Final = 4
_ERROR: Final = 2
"""Type of netlink's answers, good ones too."""

_SUBSYSTEM: Final = 3 << 8
_PACKET, _VERDICT, _CONFIG, _VERDICT_UP_TO = 0, 1, 2, 3
_OF_PACKET, _OF_VERDICT = 1, 2
_COMMAND, _COPY, _LENGTH, _MASK, _FLAGS = 1, 2, 3, 4, 5
_BIND: Final = 1
_COPY_NUMBER: Final = 1
_KEEP_WHOLE: Final = 4
"""Packets that are segmented further down come as one (NFQA_CFG_F_GSO)."""

_DROP, _ACCEPT = 0, 1
_TYPE_MASK: Final = 0x3FFF

_MESSAGE: Final = struct.Struct("=IHHII")
_FAMILY: Final = struct.Struct("!BBH")
_ATTRIBUTE: Final = struct.Struct("=HH")
_CODE: Final = struct.Struct("=i")
_U32: Final = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class Arrived:
    """A packet waits.

    Attributes:
        packet: its number: within a queue they rise, modulo 2**32.
    """

    packet: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The kernel answers a message.

    Attributes:
        sequence: number of the message.
        code: of the error; 0 for none.
    """

    sequence: int
    code: int


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def _message(kind: int, queue: int, attributes: bytes, sequence: int = 0) -> bytes:
    body = _FAMILY.pack(socket.AF_UNSPEC, 0, queue) + attributes
    flags = _REQUEST | (_ACKNOWLEDGE if sequence else 0)
    size = _MESSAGE.size + len(body)
    return _MESSAGE.pack(size, _SUBSYSTEM | kind, flags, sequence, 0) + body


def encode_setup(queue: int) -> list[bytes]:
    """The messages that bind a queue to who sends them, numbered from 1, each to be answered."""
    flags = _U32.pack(_KEEP_WHOLE)
    settings = (
        _attribute(_COMMAND, struct.pack("!BxH", _BIND, 0)),
        _attribute(_LENGTH, _U32.pack(QUEUE_PACKETS)),
        _attribute(_FLAGS, flags) + _attribute(_MASK, flags),
        _attribute(_COPY, struct.pack("!IB", 0, _COPY_NUMBER)),
    )
    return [
        _message(_CONFIG, queue, setting, sequence)
        for sequence, setting in enumerate(settings, start=1)
    ]


def encode_drop(queue: int, packet: int) -> bytes:
    """The message that ends a packet."""
    return _message(_VERDICT, queue, _attribute(_OF_VERDICT, struct.pack("!II", _DROP, packet)))


def encode_accept_up_to(queue: int, packet: int) -> bytes:
    """The message that lets a packet go, and every one that waits and came before it."""
    verdict = _attribute(_OF_VERDICT, struct.pack("!II", _ACCEPT, packet))
    return _message(_VERDICT_UP_TO, queue, verdict)


def decode(datagram: bytes) -> Iterator[Arrived | Answer]:
    """What the kernel says in a datagram; what this module does not know is passed over.

    Raises:
        ValueError: where it is no netlink message.
    """
    for kind, sequence, body in _messages(datagram):
        if kind == _ERROR:
            if len(body) < _CODE.size:
                raise ValueError("an answer without a code")
            yield Answer(sequence=sequence, code=-_CODE.unpack_from(body)[0])
        elif kind == _SUBSYSTEM | _PACKET:
            yield Arrived(packet=_packet_number(body))


def _messages(datagram: bytes) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    while offset < len(datagram):
        if offset + _MESSAGE.size > len(datagram):
            raise ValueError("a message that ends within its header")
        size, kind, _, sequence, _ = _MESSAGE.unpack_from(datagram, offset)
        if not _MESSAGE.size <= size <= len(datagram) - offset:
            raise ValueError(f"a message of {size} bytes in {len(datagram) - offset}")
        yield kind, sequence, datagram[offset + _MESSAGE.size : offset + size]
        offset += size + -size % 4


def _packet_number(body: bytes) -> int:
    offset = _FAMILY.size
    while offset + _ATTRIBUTE.size <= len(body):
        size, kind = _ATTRIBUTE.unpack_from(body, offset)
        if not _ATTRIBUTE.size <= size <= len(body) - offset:
            raise ValueError(f"an attribute of {size} bytes in {len(body) - offset}")
        if kind & _TYPE_MASK == _OF_PACKET and size >= _ATTRIBUTE.size + _U32.size:
            return int(_U32.unpack_from(body, offset + _ATTRIBUTE.size)[0])
        offset += size + -size % 4
    raise ValueError("a packet without a number")


class PacketQueue:
    """One queue of the network namespace of this process. Use as a context manager.

    Closed, or when the process ends, the kernel drops what waits; rules with ``--queue-bypass``
    then let everything through.

    Args:
        number: of the queue.

    Raises:
        OSError: EADDRINUSE where somebody else has it; else why the kernel gives none.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._waiting: list[int] = []
        self._answered = 0
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER
        )
        try:
            self._socket.bind((0, 0))
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BYTES)
            # Packets that do not fit are dropped, as on a link, and not reported as an error.
            self._socket.setsockopt(_SOL_NETLINK, _NETLINK_NO_ENOBUFS, 1)
            self._set_up()
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """For `select`: readable where packets arrived."""
        return self._socket.fileno()

    def arrived(self) -> list[int]:
        """Numbers of the packets that have arrived; waits for nothing."""
        found, self._waiting = self._waiting, []
        with suppress(BlockingIOError):
            for _ in range(_DATAGRAMS):
                found += self._receive()
        return found

    def accept_up_to(self, packet: int) -> None:
        """Lets a packet go, and every one that waits and came before it."""
        self._socket.send(encode_accept_up_to(self.number, packet))

    def drop(self, packet: int) -> None:
        """Ends a packet."""
        self._socket.send(encode_drop(self.number, packet))

    def _set_up(self) -> None:
        self._socket.settimeout(_ANSWER_S)
        try:
            for sequence, message in enumerate(encode_setup(self.number), start=1):
                self._socket.send(message)
                while self._answered != sequence:
                    self._waiting += self._receive()
        except PermissionError as error:
            # So says the kernel to who lacks NET_ADMIN, and of queues that are somebody else's.
            if self.number in _bound():
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from error
            raise
        self._socket.setblocking(False)

    def _receive(self) -> list[int]:
        datagram, sender = self._socket.recvfrom(_DATAGRAM_BYTES)
        if sender[0] != 0:
            return []  # not the kernel
        packets = []
        for heard in decode(datagram):
            if isinstance(heard, Arrived):
                packets.append(heard.packet)
            elif heard.code == 0:
                self._answered = heard.sequence
            elif heard.code != errno.ENOENT:
                raise OSError(heard.code, os.strerror(heard.code))
            # ENOENT: the packet went with its interface.
        return packets


def _bound() -> set[int]:
    """Numbers of the queues that somebody listens to."""
    try:
        lines = _QUEUES.read_text(encoding="ascii").splitlines()
    except OSError:
        return set()
    return {int(line.split()[0]) for line in lines}
