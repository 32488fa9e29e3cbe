"""What only Redis can do to a membership: go away, freeze, lose scripts, hold garbage."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import redis as redis_client

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.versions import Incarnation
from synchronizer_server.membership import Member, Membership, RedisMembership
from tests.synchronizer.redis_server import RedisServer, free_port, running_redis

pytestmark = pytest.mark.redis
RUNS = itertools.count()
ONE = Incarnation(1, 1)

CALLS: dict[str, Callable[[Membership], Awaitable[object]]] = {
    "grant_incarnation": lambda m: m.grant_incarnation("a", term=1, at_least=0),
    "heartbeat": lambda m: m.heartbeat({"a": ONE}),
    "members": lambda m: m.members(),
    "expired": lambda m: m.expired(1.0),
    "remove": lambda m: m.remove("a", ONE),
    "get_quorum": lambda m: m.get_quorum(),
    "set_quorum": lambda m: m.set_quorum(2),
    "mark_seeded": lambda m: m.mark_seeded(1),
    "is_seeded": lambda m: m.is_seeded(),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis_client.Redis]:
    host, port = server.address.split(":")
    with redis_client.Redis(host=host, port=int(port)) as made:
        yield made


@contextlib.asynccontextmanager
async def open_membership(
    address: str, run_id: str | None = None, timeout_s: float = 2.0
) -> AsyncIterator[RedisMembership]:
    made = RedisMembership(address, run_id or f"run-{next(RUNS)}", timeout_s=timeout_s)
    try:
        yield made
    finally:
        await made.aclose()


@pytest_asyncio.fixture
async def membership(server: RedisServer) -> AsyncIterator[RedisMembership]:
    async with open_membership(server.address, "garbage") as made:
        yield made


@pytest.mark.asyncio
async def test_two_synchronizers_of_one_run_see_the_same_and_other_runs_nothing(
    server: RedisServer, client: redis_client.Redis
) -> None:
    async with (
        open_membership(server.address, "shared") as first,
        open_membership(f"redis://{server.address}/0", "shared") as second,
        open_membership(server.address, "other") as other,
    ):
        granted = await first.grant_incarnation("a", term=1, at_least=0)
        await first.set_quorum(4)
        await first.mark_seeded(1)
        assert [m.incarnation for m in await second.members()] == [granted]
        assert await second.get_quorum() == 4
        assert await second.is_seeded()
        assert await other.members() == []
        assert not await other.is_seeded()
    keys = {key.decode() for key in client.keys("*shared*")}
    assert keys == {
        f"diloco:{{shared}}:g0:{name}"
        for name in ("incarnations", "heartbeats", "quorum", "seeded")
    }


@pytest.mark.asyncio
async def test_a_heartbeat_is_one_command_whatever_the_batch(
    server: RedisServer, client: redis_client.Redis
) -> None:
    async with open_membership(server.address) as membership:
        await membership.heartbeat({"a": ONE})  # loads the script
        before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        await membership.heartbeat({f"l{i}": ONE for i in range(500)})
        after = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        assert after - before == 1
        assert len(await membership.members()) == 501


@pytest.mark.asyncio
async def test_scripts_are_loaded_again_when_redis_forgot_them(
    server: RedisServer, client: redis_client.Redis
) -> None:
    async with open_membership(server.address) as membership:
        await membership.heartbeat({"a": ONE})
        client.script_flush()
        await membership.heartbeat({"b": ONE})
        assert {m.learner_id for m in await membership.members()} == {"a", "b"}


@every_call
@pytest.mark.asyncio
async def test_no_redis_gives_one_clear_error(
    call: Callable[[Membership], Awaitable[object]],
) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with open_membership(f"redis://user:secret@{address}") as membership:
        with pytest.raises(DilocoError, match=address) as caught:
            await call(membership)
        assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE
        assert "secret" not in str(caught.value) + str(caught.value.details)


@pytest.mark.asyncio
async def test_an_unknown_host_gives_one_clear_error() -> None:
    async with open_membership("no-such-host.invalid:6379") as membership:
        with pytest.raises(DilocoError, match="no-such-host") as caught:
            await membership.members()
        assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE


@pytest.mark.asyncio
async def test_a_frozen_redis_hangs_no_call_and_serves_again_after(tmp_path: Path) -> None:
    """Answers that come too late must not be taken for those of the next call."""
    with running_redis(tmp_path) as server:
        async with open_membership(server.address, timeout_s=0.2) as membership:
            await membership.set_quorum(7)
            server.freeze()
            for call in CALLS.values():
                with pytest.raises(DilocoError) as caught:
                    await asyncio.wait_for(call(membership), timeout=20)
                assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE
            server.thaw()
        async with open_membership(server.address, timeout_s=20) as membership:
            await membership.get_quorum()


@pytest.mark.asyncio
async def test_the_same_membership_goes_on_after_a_freeze(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        async with open_membership(server.address, timeout_s=1.0) as membership:
            await membership.set_quorum(7)
            server.freeze()
            with pytest.raises(DilocoError):
                await membership.is_seeded()
            server.thaw()
            for _ in range(5):
                assert await membership.get_quorum() == 7
                assert await membership.members() == []


@pytest.mark.asyncio
async def test_a_restarted_redis_is_used_again_and_filled_by_heartbeats(tmp_path: Path) -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        stack.enter_context(running_redis(tmp_path, port=port))
        async with open_membership(f"127.0.0.1:{port}") as membership:
            await membership.heartbeat({"a": Incarnation(2, 5)})
            stack.close()
            with pytest.raises(DilocoError) as caught:
                await membership.members()
            assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE
            stack.enter_context(running_redis(tmp_path, port=port))
            assert await membership.members() == []
            await membership.heartbeat({"a": Incarnation(2, 5)})
            granted = await membership.grant_incarnation("a", term=2, at_least=3)
            assert granted == Incarnation(2, 6)


@pytest.mark.asyncio
async def test_a_wrong_password_is_told_without_repeating_it(tmp_path: Path) -> None:
    with running_redis(tmp_path, password="right") as server:
        async with open_membership(f"redis://:right@{server.address}") as membership:
            assert await membership.members() == []
        for address in (f"redis://:wr0ng@{server.address}", server.address):
            async with open_membership(address) as membership:
                with pytest.raises(DilocoError, match="password") as caught:
                    await membership.members()
                assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE
                assert "wr0ng" not in str(caught.value)


@every_call
@pytest.mark.asyncio
async def test_a_server_that_is_no_redis_gives_one_clear_error(
    call: Callable[[Membership], Awaitable[object]],
) -> None:
    open_links: set[asyncio.StreamWriter] = set()

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_links.add(writer)
        with contextlib.suppress(OSError):
            while await reader.read(4096):
                writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n\x00\xff")
                await writer.drain()
        writer.close()
        open_links.discard(writer)

    web = await asyncio.start_server(babble, "127.0.0.1", 0)
    async with web:
        port = web.sockets[0].getsockname()[1]
        async with open_membership(f"127.0.0.1:{port}") as membership:
            with pytest.raises(DilocoError) as caught:
                await call(membership)
            assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE
        async with asyncio.timeout(20):
            while open_links:  # noqa: ASYNC110 - the handlers end on their own
                await asyncio.sleep(0.005)


PREFIX = "diloco:{garbage}:g0:"


@pytest.fixture(autouse=True)
def clean(client: redis_client.Redis) -> None:
    for key in client.keys("diloco:{garbage}*"):
        client.delete(key)


@pytest.mark.parametrize(
    "text", [b"", b"x", b"1", b"1.", b"-1.2", b"1.2.3", b"1e3.1", b"\xff.1", b"9" * 40 + b".1"]
)
@pytest.mark.asyncio
async def test_a_garbled_incarnation_is_refused(
    membership: RedisMembership, client: redis_client.Redis, text: bytes
) -> None:
    client.hset(PREFIX + "incarnations", "a", text)
    client.zadd(PREFIX + "heartbeats", {"a": 1})
    for name in ("grant_incarnation", "heartbeat", "members", "expired"):
        with pytest.raises(DilocoError) as caught:
            await CALLS[name](membership)
        assert caught.value.reason is Reason.MALFORMED
    assert not await membership.remove("a", ONE)
    assert client.hget(PREFIX + "incarnations", "a") == text


@pytest.mark.parametrize("text", [b"", b"x", b"0", b"-1", b"1.5", b"\xff", b"9" * 40])
@pytest.mark.asyncio
async def test_garbled_settings_are_refused(
    membership: RedisMembership, client: redis_client.Redis, text: bytes
) -> None:
    client.set(PREFIX + "quorum", text)
    client.set(PREFIX + "seeded", text)
    for name in ("get_quorum", "is_seeded"):
        with pytest.raises(DilocoError) as caught:
            await CALLS[name](membership)
        assert caught.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("name", ["incarnations", "heartbeats", "quorum", "seeded"])
@pytest.mark.asyncio
async def test_keys_of_another_type_are_refused(
    membership: RedisMembership, client: redis_client.Redis, name: str
) -> None:
    client.rpush(PREFIX + name, "x")
    call = {"quorum": "get_quorum", "seeded": "is_seeded"}.get(name, "grant_incarnation")
    with pytest.raises(DilocoError, match=r"diloco:\{garbage\}:g0:\*") as caught:
        await CALLS[call](membership)
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.asyncio
async def test_strange_members_are_refused(
    membership: RedisMembership, client: redis_client.Redis
) -> None:
    client.zadd(PREFIX + "heartbeats", {b"\xff\xfe": 1})
    client.hset(PREFIX + "incarnations", b"\xff\xfe", "1.1")
    with pytest.raises(DilocoError) as caught:
        await membership.members()
    assert caught.value.reason is Reason.MALFORMED
    client.delete(PREFIX + "heartbeats")
    client.zadd(PREFIX + "heartbeats", {"without incarnation": 1})
    with pytest.raises(DilocoError) as caught:
        await membership.members()
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.asyncio
async def test_strange_times_are_refused_or_harmless(
    membership: RedisMembership, client: redis_client.Redis
) -> None:
    client.hset(PREFIX + "incarnations", "a", "1.1")
    client.zadd(PREFIX + "heartbeats", {"a": 2**60})  # a clock that went back
    assert await membership.members() == [Member(learner_id="a", incarnation=ONE, age_s=0.0)]
    client.zadd(PREFIX + "heartbeats", {"a": float("-inf")})
    with pytest.raises(DilocoError) as caught:
        await membership.members()
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.parametrize(
    "address",
    [
        "",
        "redis://",
        "http://:hunter2@host",
        "redis://:hunter2@host:port",
        "redis://:hunter2@host/x",
        "redis://:hunter2@host?socket_timeout=1000",
        "unix:///tmp/x",
        "redis://:hunter2@[::1",
        "host:99999",
    ],
)
def test_an_address_that_cannot_be_right_is_refused_without_its_password(address: str) -> None:
    with pytest.raises(UsageError) as caught:
        RedisMembership(address, "run")
    assert caught.value.reason is Reason.CONFIG_INVALID
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("run_id", ["", "a{b", "a}b"])
def test_a_run_id_that_breaks_the_keys_is_refused(run_id: str) -> None:
    with pytest.raises(UsageError):
        RedisMembership("localhost", run_id)


@pytest.mark.asyncio
async def test_a_black_hole_gives_one_clear_error() -> None:
    """A listener that never answers: connected, then silence."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        async with open_membership(f"127.0.0.1:{port}", timeout_s=0.1) as membership:
            with pytest.raises(DilocoError, match=r"0\.1 s|[Tt]imeout") as caught:
                await asyncio.wait_for(membership.members(), timeout=20)
            assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE


@pytest.mark.asyncio
async def test_an_answer_that_never_ends_hangs_no_call() -> None:
    """Every byte comes in time; only the bound on the whole call helps."""

    ended = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read(1)
            writer.write(b"$1000000\r\n")
            while not writer.is_closing():
                writer.write(b"1")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()
        ended.set()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with open_membership(f"127.0.0.1:{port}", timeout_s=0.3) as membership:
            with pytest.raises(DilocoError) as caught:
                await asyncio.wait_for(membership.get_quorum(), timeout=20)
            assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE
        await asyncio.wait_for(ended.wait(), timeout=20)
