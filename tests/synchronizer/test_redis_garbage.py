"""What another program may have written into Redis is never believed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import redis as redis_client

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.membership import Member
from tests.synchronizer.keepers import CALLS, LEASE_CALLS, ONE, Process, process_at, prolong, take
from tests.synchronizer.redis_server import RedisServer, running_redis

pytestmark = pytest.mark.redis
PREFIX = "diloco:{garbage}:g0:"
FENCED = ("grant_incarnation", "heartbeat", "expire", "remove", "set_quorum", "mark_seeded")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis_client.Redis]:
    host, port = server.address.split(":")
    with redis_client.Redis(host=host, port=int(port)) as made:
        for key in made.keys(PREFIX + "*"):
            made.delete(key)
        yield made


@pytest_asyncio.fixture
async def process(server: RedisServer) -> AsyncIterator[Process]:
    async with process_at(server.address, "garbage") as made:
        yield made


async def refused(process: Process, *names: str) -> str:
    """Every one of these calls is refused; returns the last message."""
    for name in names:
        with pytest.raises(DilocoError, match=r"diloco:\{garbage\}:g0:\*") as caught:
            await CALLS[name](process)
        assert caught.value.reason is Reason.MALFORMED, name
    return caught.value.message


@pytest.mark.parametrize(
    "text", [b"", b"x", b"1", b"1.", b"-1.2", b"1.2.3", b"1e3.1", b"\xff.1", b"9" * 40 + b".1"]
)
@pytest.mark.asyncio
async def test_a_garbled_incarnation_is_refused(
    process: Process, client: redis_client.Redis, text: bytes
) -> None:
    client.hset(PREFIX + "incarnations", "a", text)
    client.zadd(PREFIX + "heartbeats", {"a": 1})
    await refused(process, "grant_incarnation", "heartbeat", "members", "expire", "read_back")
    assert not await process.membership.remove("a", ONE, 1)
    assert client.hget(PREFIX + "incarnations", "a") == text


@pytest.mark.parametrize("text", [b"", b"x", b"0", b"-1", b"1.5", b"\xff", b"9" * 40])
@pytest.mark.asyncio
async def test_garbled_settings_are_refused(
    process: Process, client: redis_client.Redis, text: bytes
) -> None:
    client.set(PREFIX + "quorum", text)
    client.set(PREFIX + "seeded", text)
    await refused(process, "is_seeded", "read_back")


USERS = {
    "incarnations": ("grant_incarnation", "heartbeat"),
    "heartbeats": ("grant_incarnation", "members", "expire", "read_back"),
    "quorum": ("read_back",),
    "seeded": ("is_seeded", "read_back"),
    "term": (*FENCED, *LEASE_CALLS),
    "lease": tuple(LEASE_CALLS),
    "in_sync": tuple(LEASE_CALLS),
}


@pytest.mark.parametrize("name", USERS)
@pytest.mark.asyncio
async def test_keys_of_another_type_are_refused(
    process: Process, client: redis_client.Redis, name: str
) -> None:
    client.rpush(PREFIX + name, "x")
    await refused(process, *USERS[name])


@pytest.mark.asyncio
async def test_strange_members_are_refused(process: Process, client: redis_client.Redis) -> None:
    client.zadd(PREFIX + "heartbeats", {b"\xff\xfe": 1})
    client.hset(PREFIX + "incarnations", b"\xff\xfe", "1.1")
    with pytest.raises(DilocoError) as caught:
        await process.membership.members()
    assert caught.value.reason is Reason.MALFORMED
    client.delete(PREFIX + "heartbeats")
    client.zadd(PREFIX + "heartbeats", {"without incarnation": 1})
    with pytest.raises(DilocoError) as caught:
        await process.membership.members()
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.asyncio
async def test_strange_times_are_refused_or_harmless(
    process: Process, client: redis_client.Redis
) -> None:
    client.hset(PREFIX + "incarnations", "a", "1.1")
    client.zadd(PREFIX + "heartbeats", {"a": 2**60})  # a clock that went back
    assert await process.membership.members() == [
        Member(learner_id="a", incarnation=ONE, age_s=0.0)
    ]
    client.zadd(PREFIX + "heartbeats", {"a": float("-inf")})
    with pytest.raises(DilocoError) as caught:
        await process.membership.members()
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.parametrize(
    "text",
    [
        b"", b"x", b"0", b"-1", b"07", b"1.5", b"1e3", b"\xff", b"9" * 400, b"9007199254740992",
        b"9007199254740991",  # no term is left above this one
    ],
)  # fmt: skip
@pytest.mark.asyncio
async def test_a_garbled_term_stops_every_writer_and_the_lease(
    process: Process, client: redis_client.Redis, text: bytes
) -> None:
    client.set(PREFIX + "term", text)
    message = await refused(process, *FENCED, *LEASE_CALLS)
    assert "holds a term" in message
    assert client.get(PREFIX + "term") == text
    assert client.keys(PREFIX + "*") == [(PREFIX + "term").encode()], "nothing was written"


@pytest.mark.parametrize(
    "text", ["", "x", "null", "1", '"b"', "{}", '["b"', '["b", 1]', '[["b"]]', "[null]", "[" * 2000]
)
@pytest.mark.asyncio
async def test_garbled_standbys_are_refused(
    process: Process, client: redis_client.Redis, text: str
) -> None:
    client.set(PREFIX + "in_sync", text)
    message = await refused(process, *LEASE_CALLS)
    assert "holds a in_sync" in message
    assert client.keys(PREFIX + "*") == [(PREFIX + "in_sync").encode()], "nothing was written"


@pytest.mark.parametrize("text", ["", "x", "-1", "1e3", "0x1", "nan", "9" * 400])
@pytest.mark.asyncio
async def test_a_garbled_revision_stops_whoever_would_write_over_it(
    process: Process, client: redis_client.Redis, text: str
) -> None:
    client.set(PREFIX + "in_sync_revision", text)
    await refused(process, "set_in_sync")
    assert client.keys(PREFIX + "*") == [(PREFIX + "in_sync_revision").encode()]
    await prolong(process.lease, process.claim(), in_sync=("b",))
    assert await process.lease.set_in_sync(process.claim(), ["c"], revision=1), "written anew"


@pytest.mark.asyncio
async def test_standbys_that_are_no_text_are_refused(
    process: Process, client: redis_client.Redis
) -> None:
    client.set(PREFIX + "in_sync", b'["\xff"]')
    await refused(process, "read")


GOOD = {
    "run_id": "garbage", "term": "3", "leader_id": "x", "signature": "00ff", "address": "x:1",
}  # fmt: skip
BAD: dict[str, dict[str, str | bytes | None]] = {
    "another run": {"run_id": "other"},
    "no leader": {"leader_id": ""},
    "no text": {"leader_id": b"\xff"},
    "long leader": {"leader_id": "x" * 1001},
    "long address": {"address": "x" * 1001},
    "no hex": {"signature": "zz"},
    "half a byte": {"signature": "0"},
    "long signature": {"signature": "00" * 65},
    "term 0": {"term": "0"},
    "no number": {"term": "x"},
    "too large": {"term": str(2**53)},
} | {f"without {name}": {name: None} for name in GOOD}


def write_lease(client: redis_client.Redis, change: dict[str, str | bytes | None]) -> None:
    fields = {name: text for name, text in (GOOD | change).items() if text is not None}
    client.hset(PREFIX + "lease", mapping=fields)


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
@pytest.mark.asyncio
async def test_a_garbled_lease_is_refused_and_left_alone(
    process: Process, client: redis_client.Redis, change: dict[str, str | bytes | None]
) -> None:
    write_lease(client, change)
    client.expire(PREFIX + "lease", 100)
    before = client.hgetall(PREFIX + "lease")
    await refused(process, "read", "acquire", "renew")
    assert client.hgetall(PREFIX + "lease") == before
    assert client.keys(PREFIX + "*") == [(PREFIX + "lease").encode()]


@pytest.mark.asyncio
async def test_a_lease_that_never_ends_is_refused(
    process: Process, client: redis_client.Redis
) -> None:
    write_lease(client, {})
    await refused(process, *LEASE_CALLS)
    client.expire(PREFIX + "lease", 100)
    view = await process.lease.read()
    assert view.holder is not None
    assert (view.holder.leader_id, view.holder.signature) == ("x", b"\x00\xff")


@pytest.mark.asyncio
async def test_where_the_standbys_are_lost_alone_nobody_follows_until_the_leader_says_so(
    process: Process, client: redis_client.Redis
) -> None:
    claim = process.claim(2)
    await prolong(process.lease, claim, in_sync=("b",))
    client.delete(PREFIX + "in_sync")
    assert (await process.lease.read()).in_sync == frozenset()
    client.delete(PREFIX + "lease")
    follower = process.claim(3, "b")
    assert (await take(process.lease, follower)).holder is None
    assert (await prolong(process.lease, claim, in_sync=("b",))).in_sync == {"b"}
    await process.lease.release(claim)
    assert (await take(process.lease, follower)).holder == follower


@pytest.mark.asyncio
async def test_a_redis_put_back_to_an_earlier_term_learns_the_later_one(
    process: Process, client: redis_client.Redis
) -> None:
    client.set(PREFIX + "term", 4)
    client.set(PREFIX + "in_sync", json.dumps(["stale"]))
    view = await prolong(process.lease, process.claim(6), in_sync=("b",))
    assert (view.holder, view.term, view.in_sync) == (process.claim(6), 6, {"b"})
    assert (await prolong(process.lease, process.claim(4, "old"))).holder == process.claim(6)


@pytest.mark.asyncio
async def test_a_quorum_that_is_not_ours_is_mended_by_setting_it(
    process: Process, client: redis_client.Redis
) -> None:
    client.set(PREFIX + "quorum", "x")
    await refused(process, "read_back")
    await process.membership.set_quorum(2, 1)
    assert (await process.membership.read_back()).quorum == 2
