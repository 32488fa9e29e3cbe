"""Membership and lease in Redis: keys, round trips, addresses, and servers that are none."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import redis as redis_client

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.versions import Incarnation
from synchronizer_server.membership import RedisClient
from tests.synchronizer.keepers import CALLS, LEASE_CALLS, ONE, Process, process_at, prolong
from tests.synchronizer.redis_server import RedisServer, free_port, running_redis

pytestmark = pytest.mark.redis
Call = Callable[[Process], Awaitable[object]]
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


@pytest.mark.asyncio
async def test_two_synchronizers_of_one_run_see_the_same_and_other_runs_nothing(
    server: RedisServer, client: redis_client.Redis
) -> None:
    async with (
        process_at(server.address, "shared") as first,
        process_at(f"redis://{server.address}/0", "shared") as second,
        process_at(server.address, "other") as other,
    ):
        granted = await first.membership.grant_incarnation("a", ONE)
        await first.membership.set_quorum(4, 1)
        await first.membership.mark_seeded(1)
        await prolong(first.lease, first.claim(1), in_sync=("b",))
        roll = await second.membership.read_back()
        assert [m.incarnation for m in roll.members] == [granted]
        assert (roll.quorum, roll.seeded) == (4, True)
        assert (await second.lease.read()).holder == first.claim(1)
        assert await other.membership.members() == []
        assert not await other.membership.is_seeded()
        assert (await other.lease.read()).in_sync is None
    names = (
        "incarnations",
        "heartbeats",
        "quorum",
        "seeded",
        "lease",
        "term",
        "in_sync",
        "in_sync_revision",
    )
    keys = {key.decode() for key in client.keys("*shared*")}
    assert keys == {f"diloco:{{shared}}:g0:{name}" for name in names}
    expiring = {key for key in keys if client.ttl(key) >= 0}
    assert expiring == {"diloco:{shared}:g0:lease"}


def commands(client: redis_client.Redis) -> collections.Counter[str]:
    """How often each command ran, in scripts or not."""
    stats = client.info("commandstats").items()
    return collections.Counter(
        {name.removeprefix("cmdstat_"): value["calls"] for name, value in stats}
    )


@pytest.mark.asyncio
async def test_a_heartbeat_is_one_round_trip_whatever_the_batch(
    server: RedisServer, client: redis_client.Redis
) -> None:
    async with process_at(server.address) as process:
        await process.membership.heartbeat({"a": ONE}, 1)  # loads the script
        batch = {f"learner-{i}": Incarnation(1, i + 1) for i in range(5000)}
        for news in (True, False):
            before = commands(client)
            await process.membership.heartbeat(batch, 1)
            spent = commands(client) - before
            inside = {"time": 1, "get": 1, "zadd": 5000, "hget": 10_000 if news else 5000}
            if news:
                inside["hset"] = 5000
            assert spent == {"evalsha": 1, "info": 1, **inside}
        assert len(await process.membership.members()) == 5001


@pytest.mark.parametrize("call", LEASE_CALLS.values(), ids=LEASE_CALLS.keys())
@pytest.mark.asyncio
async def test_every_call_of_the_lease_is_one_round_trip(
    server: RedisServer, client: redis_client.Redis, call: Call
) -> None:
    async with process_at(server.address) as process:
        await call(process)  # loads the script
        before = commands(client)
        await call(process)
        spent = commands(client) - before
        assert spent["evalsha"] == 1
        assert not set(spent) & {"eval", "script", "watch", "multi", "exec"}


@pytest.mark.asyncio
async def test_membership_and_lease_share_connections(
    server: RedisServer, client: redis_client.Redis
) -> None:
    async with process_at(server.address) as process:
        before = client.info("clients")["connected_clients"]
        for call in CALLS.values():
            await call(process)
        assert client.info("clients")["connected_clients"] == before + 1


@pytest.mark.asyncio
async def test_scripts_are_loaded_again_when_redis_forgot_them(
    server: RedisServer, client: redis_client.Redis
) -> None:
    async with process_at(server.address) as process:
        await process.membership.heartbeat({"a": ONE}, 1)
        client.script_flush()
        await process.membership.heartbeat({"b": ONE}, 1)
        assert {m.learner_id for m in await process.membership.members()} == {"a", "b"}


@every_call
@pytest.mark.asyncio
async def test_no_redis_gives_one_clear_error(call: Call) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with process_at(f"redis://user:secret@{address}") as process:
        with pytest.raises(DilocoError, match=address) as caught:
            await call(process)
        assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE
        assert "secret" not in str(caught.value) + str(caught.value.details)


@pytest.mark.asyncio
async def test_an_unknown_host_gives_one_clear_error() -> None:
    async with process_at("no-such-host.invalid:6379") as process:
        with pytest.raises(DilocoError, match="no-such-host") as caught:
            await process.membership.members()
        assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE


@pytest.mark.asyncio
async def test_a_wrong_password_is_told_without_repeating_it(tmp_path: Path) -> None:
    with running_redis(tmp_path, password="right") as server:
        async with process_at(f"redis://:right@{server.address}") as process:
            assert await process.membership.members() == []
        for address in (f"redis://:wr0ng@{server.address}", server.address):
            async with process_at(address) as process:
                with pytest.raises(DilocoError, match="password") as caught:
                    await process.membership.members()
                assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE
                assert "wr0ng" not in str(caught.value)


@every_call
@pytest.mark.asyncio
async def test_a_server_that_is_no_redis_gives_one_clear_error(call: Call) -> None:
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
        async with process_at(f"127.0.0.1:{port}") as process:
            with pytest.raises(DilocoError) as caught:
                await call(process)
            assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE
        async with asyncio.timeout(20):
            while open_links:  # noqa: ASYNC110 - the handlers end on their own
                await asyncio.sleep(0.005)


@pytest.mark.asyncio
async def test_a_black_hole_gives_one_clear_error() -> None:
    """A listener that never answers: connected, then silence."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        async with process_at(f"127.0.0.1:{port}", timeout_s=0.1) as process:
            with pytest.raises(DilocoError, match=r"0\.1 s|[Tt]imeout") as caught:
                await asyncio.wait_for(process.membership.members(), timeout=20)
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
        async with process_at(f"127.0.0.1:{port}", timeout_s=0.3) as process:
            with pytest.raises(DilocoError) as caught:
                await asyncio.wait_for(process.membership.is_seeded(), timeout=20)
            assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE
        await asyncio.wait_for(ended.wait(), timeout=20)


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
        RedisClient(address, "run")
    assert caught.value.reason is Reason.CONFIG_INVALID
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("run_id", ["", "a{b", "a}b"])
def test_a_run_id_that_breaks_the_keys_is_refused(run_id: str) -> None:
    with pytest.raises(UsageError):
        RedisClient("localhost", run_id)
