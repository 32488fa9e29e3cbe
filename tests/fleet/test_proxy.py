"""The TCP proxy with real sockets: what gets through is whole and in order, what is cut is cut."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from decoupled_diloco.errors import UsageError
from diloco_fleet.chaos.pipe import BUFFER_BYTES
from diloco_fleet.chaos.proxy import Cut, Link, Proxies, Way

PATIENCE_S = 60.0
MOMENT_S = 0.3


def until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.005)


class Server:
    """Listens; hands out the connections that it took."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(PATIENCE_S)
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def accept(self) -> socket.socket:
        end, _ = self._socket.accept()
        end.settimeout(PATIENCE_S)
        return end

    def close(self) -> None:
        self._socket.close()


def connect(link: Link) -> socket.socket:
    host, _, port = link.address.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def proxies() -> Iterator[Proxies]:
    with Proxies() as proxies:
        yield proxies


@pytest.fixture
def pair(server: Server, proxies: Proxies) -> Iterator[tuple[Link, socket.socket, socket.socket]]:
    """A link, who connected through it, and who was connected to."""
    link = proxies.link("test", server.address)
    near = connect(link)
    far = server.accept()
    yield link, near, far
    near.close()
    far.close()


def receive(end: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = end.recv(num_bytes)
        assert part, "the stream ended early"
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def drained(end: socket.socket) -> bytes:
    parts = []
    while part := end.recv(65536):
        parts.append(part)
    return b"".join(parts)


def silent(end: socket.socket) -> bool:
    """Nothing arrives for a moment; that something would have is what the callers have seen."""
    end.settimeout(MOMENT_S)
    try:
        end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(PATIENCE_S)
    return False


def is_reset(end: socket.socket) -> bool:
    try:
        while end.recv(65536):
            pass
    except ConnectionResetError:
        return True
    return False


def is_refused(link: Link) -> bool:
    """Whether a new connection breaks, while it is made or right after."""
    try:
        with connect(link) as end:
            return is_reset(end)
    except ConnectionResetError:
        return True


Pair = tuple[Link, socket.socket, socket.socket]


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_bytes_arrive_whole_and_in_order_both_ways_at_once(pair: Pair, delay_s: float) -> None:
    link, near, far = pair
    link.delay(delay_s)
    content = {near: random.Random(1).randbytes(3_000_000), far: random.Random(2).randbytes(70_001)}
    got: dict[socket.socket, bytes] = {}

    def send(end: socket.socket) -> None:
        end.sendall(content[end])
        end.shutdown(socket.SHUT_WR)

    threads = [threading.Thread(target=send, args=(end,)) for end in (near, far)]
    threads += [
        threading.Thread(target=lambda end=end: got.update({end: drained(end)}))
        for end in (near, far)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert hashlib.sha256(got[far]).digest() == hashlib.sha256(content[near]).digest()
    assert got[near] == content[far]
    until(lambda: link.state().num_connections == 0, "the connection to be over")
    assert (link.state().bytes_up, link.state().bytes_down) == (3_000_000, 70_001)


def test_the_end_of_one_direction_leaves_the_other_open(pair: Pair) -> None:
    _, near, far = pair
    near.sendall(b"question")
    near.shutdown(socket.SHUT_WR)
    assert drained(far) == b"question"
    far.sendall(b"answer")
    assert receive(near, 6) == b"answer"
    far.close()
    assert drained(near) == b""


def test_a_reset_is_passed_on_as_a_reset(pair: Pair) -> None:
    _, near, far = pair
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    far.close()
    assert is_reset(near)


def test_a_reset_comes_after_the_delayed_bytes_before_it(pair: Pair) -> None:
    link, near, far = pair
    link.delay(0.2)
    far.sendall(b"last words")
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    far.close()
    assert receive(near, 10) == b"last words"
    assert is_reset(near)


def test_a_slow_reader_holds_up_its_sender_and_nothing_piles_up(pair: Pair) -> None:
    _, near, far = pair
    near.settimeout(MOMENT_S)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 20 * BUFFER_BYTES:
            sent += near.send(bytes(65536))
    assert sent < 20 * BUFFER_BYTES, "the sender waits before everything is taken"
    near.settimeout(PATIENCE_S)
    near.shutdown(socket.SHUT_WR)
    assert len(drained(far)) == sent


def test_a_cut_by_reset_breaks_what_is_there_and_what_comes(pair: Pair, server: Server) -> None:
    link, near, far = pair
    link.cut(Cut.RESET)
    assert is_reset(near)
    assert is_reset(far)
    assert is_refused(link)
    link.heal()
    healed = connect(link)
    again = server.accept()
    healed.sendall(b"x")
    assert again.recv(1) == b"x"
    for end in (healed, again):
        end.close()


def test_a_black_hole_holds_everything_and_loses_nothing(pair: Pair) -> None:
    link, near, far = pair
    near.sendall(b"before")
    assert receive(far, 6) == b"before"
    link.cut(Cut.BLACKHOLE)
    near.sendall(b"during")
    far.sendall(b"back")
    assert silent(far)
    assert silent(near)
    link.heal()
    assert receive(far, 6) == b"during"
    assert receive(near, 4) == b"back"


def test_a_black_hole_in_one_direction_lets_the_other_through(pair: Pair) -> None:
    link, near, far = pair
    link.cut(Cut.BLACKHOLE, Way.DOWN)
    near.sendall(b"up")
    assert receive(far, 2) == b"up"
    far.sendall(b"down")
    assert silent(near)
    link.heal()
    assert receive(near, 4) == b"down"


def test_a_death_behind_a_black_hole_is_not_heard_of_until_it_is_healed(pair: Pair) -> None:
    link, near, far = pair
    link.cut(Cut.BLACKHOLE)
    far.close()
    assert silent(near)
    link.heal()
    assert near.recv(1) == b""


def test_a_new_connection_into_a_black_hole_hears_nothing(server: Server, proxies: Proxies) -> None:
    link = proxies.link("test", server.address)
    link.cut(Cut.BLACKHOLE)
    near = connect(link)
    near.sendall(b"hello")
    assert silent(near)
    link.heal()
    far = server.accept()
    assert receive(far, 5) == b"hello"
    near.close()
    far.close()


def test_a_delay_puts_off_every_byte(pair: Pair) -> None:
    link, near, far = pair
    link.delay(0.25, Way.UP)
    began = time.monotonic()
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    assert time.monotonic() - began >= 0.25
    link.delay(3600.0)
    near.sendall(b"y")
    assert silent(far)
    link.heal()
    assert far.recv(1) == b"y", "what is on its way is healed, too"


def test_all_connections_of_a_link_share_its_rate(server: Server, proxies: Proxies) -> None:
    link = proxies.link("test", server.address)
    link.limit(200_000.0, Way.UP)
    ends = []
    began = time.monotonic()
    for _ in range(2):
        near = connect(link)
        ends.append((near, server.accept()))
        near.sendall(bytes(30_000))
    for _, far in ends:
        receive(far, 30_000)
    assert time.monotonic() - began >= 0.28
    for near, far in ends:
        near.close()
        far.close()


def test_a_target_that_is_not_there_breaks_the_connection(proxies: Proxies) -> None:
    assert is_refused(proxies.link("test", "127.0.0.1:1"))


def test_what_cannot_be_is_refused(proxies: Proxies, server: Server) -> None:
    link = proxies.link("test", server.address)
    for wrong in (
        lambda: link.delay(-1.0),
        lambda: link.limit(0.0),
        lambda: link.cut(Cut.RESET, Way.UP),
        lambda: proxies.link("test", "nowhere"),
        lambda: proxies.link("test", server.address, port=int(link.address.rpartition(":")[2])),
    ):
        with pytest.raises(UsageError):
            wrong()
