"""One conformance suite for both memberships: in memory, and in a real Redis."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.versions import Incarnation
from synchronizer_server.membership import Membership, MemoryMembership, RedisMembership
from tests.synchronizer.redis_server import RedisServer, running_redis

RUNS = itertools.count()


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    directory: Path = tmp_path_factory.mktemp("redis")
    with running_redis(directory) as server:
        yield server


@pytest_asyncio.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def membership(request: pytest.FixtureRequest) -> AsyncIterator[Membership]:
    made: Membership
    if request.param == "memory":
        made = MemoryMembership()
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        made = RedisMembership(server.address, f"run-{next(RUNS)}")
    yield made
    await made.aclose()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 - the other side has no event to wait for
            await asyncio.sleep(0.005)


async def alive(membership: Membership) -> dict[str, Incarnation]:
    return {member.learner_id: member.incarnation for member in await membership.members()}


@pytest.mark.asyncio
async def test_a_fresh_membership_knows_nothing(membership: Membership) -> None:
    assert await membership.members() == []
    assert await membership.expired(0.0) == []
    assert await membership.get_quorum() is None
    assert not await membership.is_seeded()
    assert not await membership.remove("a", Incarnation(1, 1))
    await membership.heartbeat({})
    assert await membership.members() == []


@pytest.mark.asyncio
async def test_incarnations_count_up_over_terms_and_above_what_the_record_knows(
    membership: Membership,
) -> None:
    assert await membership.grant_incarnation("a", term=1, at_least=0) == Incarnation(1, 1)
    assert await membership.grant_incarnation("a", term=1, at_least=0) == Incarnation(1, 2)
    assert await membership.grant_incarnation("a", term=1, at_least=7) == Incarnation(1, 8)
    assert await membership.grant_incarnation("a", term=3, at_least=2) == Incarnation(3, 9)
    assert await membership.grant_incarnation("b", term=3, at_least=0) == Incarnation(3, 1)
    assert await alive(membership) == {"a": Incarnation(3, 9), "b": Incarnation(3, 1)}


@pytest.mark.asyncio
async def test_concurrent_grants_never_give_one_number_twice(membership: Membership) -> None:
    granted = await asyncio.gather(
        *(membership.grant_incarnation("a", term=1, at_least=0) for _ in range(20))
    )
    assert sorted(incarnation.number for incarnation in granted) == list(range(1, 21))


@pytest.mark.asyncio
async def test_a_leader_whose_term_is_over_grants_nothing(membership: Membership) -> None:
    await membership.grant_incarnation("a", term=5, at_least=0)
    with pytest.raises(DilocoError, match=r"5\.1.*term 4 is over") as caught:
        await membership.grant_incarnation("a", term=4, at_least=0)
    assert caught.value.reason is Reason.STALE_TERM
    assert await alive(membership) == {"a": Incarnation(5, 1)}


@pytest.mark.asyncio
async def test_large_numbers_stay_exact(membership: Membership) -> None:
    large = 2**52
    assert await membership.grant_incarnation("a", term=large, at_least=large) == Incarnation(
        large, large + 1
    )
    assert await alive(membership) == {"a": Incarnation(large, large + 1)}


@pytest.mark.asyncio
async def test_an_older_incarnation_never_overwrites_a_newer_one(membership: Membership) -> None:
    new = await membership.grant_incarnation("a", term=2, at_least=4)
    for old in (Incarnation(1, 9), Incarnation(2, 4)):
        await membership.heartbeat({"a": old, "b": Incarnation(1, 1)})
        assert await alive(membership) == {"a": new, "b": Incarnation(1, 1)}
    await membership.heartbeat({"a": Incarnation(3, 6)})
    assert (await alive(membership))["a"] == Incarnation(3, 6)


@pytest.mark.asyncio
async def test_the_heartbeat_of_a_fenced_incarnation_does_not_keep_the_learner_alive(
    membership: Membership,
) -> None:
    await membership.grant_incarnation("a", term=1, at_least=1)
    fenced = Incarnation(1, 1)

    async def aged() -> bool:
        await membership.heartbeat({"a": fenced})
        return len(await membership.expired(0.05)) == 1

    await until(aged)


@pytest.mark.asyncio
async def test_expired_learners_are_named_longest_unheard_first_and_return_by_a_heartbeat(
    membership: Membership,
) -> None:
    await membership.heartbeat({"z": Incarnation(1, 1)})
    await until(lambda: _num_expired(membership, 0.02, 1))
    await membership.heartbeat({"a": Incarnation(1, 1)})
    await until(lambda: _num_expired(membership, 0.02, 2))
    expired = await membership.expired(0.02)
    assert [member.learner_id for member in expired] == ["z", "a"]
    assert expired[0].age_s > expired[1].age_s > 0.02
    assert [m.learner_id for m in await membership.members()] == ["z", "a"]
    await membership.heartbeat({"z": Incarnation(1, 1)})
    assert [m.learner_id for m in await membership.members()] == ["a", "z"]
    assert await membership.expired(3600.0) == []


async def _num_expired(membership: Membership, older_than_s: float, count: int) -> bool:
    return len(await membership.expired(older_than_s)) == count


@pytest.mark.asyncio
async def test_remove_takes_only_the_current_incarnation_and_keeps_its_number(
    membership: Membership,
) -> None:
    first = await membership.grant_incarnation("a", term=1, at_least=0)
    second = await membership.grant_incarnation("a", term=1, at_least=0)
    assert not await membership.remove("a", first)
    assert await alive(membership) == {"a": second}
    assert await membership.remove("a", second)
    assert not await membership.remove("a", second)
    assert await alive(membership) == {}
    assert await membership.grant_incarnation("a", term=1, at_least=0) == Incarnation(1, 3)


@pytest.mark.asyncio
async def test_a_removed_learner_that_is_heard_again_is_a_member_again(
    membership: Membership,
) -> None:
    incarnation = await membership.grant_incarnation("a", term=1, at_least=0)
    await membership.remove("a", incarnation)
    await membership.heartbeat({"a": incarnation})
    assert await alive(membership) == {"a": incarnation}


@pytest.mark.asyncio
async def test_quorum_is_what_was_set_last_and_never_below_one(membership: Membership) -> None:
    await membership.set_quorum(3)
    await membership.set_quorum(2)
    assert await membership.get_quorum() == 2
    with pytest.raises(UsageError) as caught:
        await membership.set_quorum(0)
    assert caught.value.reason is Reason.CONFIG_INVALID
    assert await membership.get_quorum() == 2


@pytest.mark.asyncio
async def test_only_the_first_seeding_counts(membership: Membership) -> None:
    assert await membership.mark_seeded(1)
    assert not await membership.mark_seeded(1)
    assert not await membership.mark_seeded(2)
    assert await membership.is_seeded()


@pytest.mark.asyncio
async def test_a_large_batch_with_odd_names_comes_back_whole(membership: Membership) -> None:
    batch = {f"learner {i} é{{}}:*": Incarnation(1 + i % 3, i + 1) for i in range(3000)}
    await membership.heartbeat(batch)
    assert await alive(membership) == batch


@pytest.mark.asyncio
async def test_memory_measures_age_by_the_clock_it_was_given() -> None:
    now = 100.0
    membership = MemoryMembership(clock=lambda: now)
    await membership.heartbeat({"a": Incarnation(1, 1)})
    now = 107.5
    (member,) = await membership.members()
    assert member.age_s == 7.5
    assert await membership.expired(7.5) == []
    assert await membership.expired(7.4) == [member]
