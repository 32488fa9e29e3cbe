"""One conformance suite for both memberships: in memory, and in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import pytest_asyncio

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.versions import Incarnation
from synchronizer_server.membership import Membership, MemoryMembership, Roll
from synchronizer_server.membership.redis_client import MAX_TERM
from tests.synchronizer.keepers import Keeper, claim_of, keeper_in, prolong, take, until
from tests.synchronizer.redis_server import RedisServer, running_redis

ONE = Incarnation(1, 1)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest_asyncio.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def keeper(request: pytest.FixtureRequest) -> AsyncIterator[Keeper]:
    is_memory = request.param == "memory"
    server = None if is_memory else request.getfixturevalue("redis_server")
    async with keeper_in(server) as made:
        yield made


@pytest.fixture
def membership(keeper: Keeper) -> Membership:
    return keeper.membership()


async def alive(membership: Membership) -> dict[str, Incarnation]:
    return {member.learner_id: member.incarnation for member in await membership.members()}


@pytest.mark.asyncio
async def test_a_fresh_membership_knows_nothing(membership: Membership) -> None:
    assert await membership.members() == []
    assert await membership.expire(0.0, 1) == []
    assert await membership.read_back() == Roll(members=(), quorum=None, seeded=False)
    assert not await membership.is_seeded()
    assert not await membership.remove("a", Incarnation(1, 1), 1)
    await membership.heartbeat({}, 1)
    assert await membership.members() == []


async def enter(membership: Membership, *lives: Incarnation, learner_id: str = "a") -> None:
    """Each of them is granted as proposed."""
    for life in lives:
        assert await membership.grant_incarnation(learner_id, life) == life


@pytest.mark.asyncio
async def test_what_is_proposed_above_all_that_is_known_is_granted(membership: Membership) -> None:
    await enter(membership, ONE, Incarnation(1, 2), Incarnation(1, 8), Incarnation(3, 9))
    await enter(membership, Incarnation(3, 1), learner_id="b")
    assert await alive(membership) == {"a": Incarnation(3, 9), "b": Incarnation(3, 1)}


@pytest.mark.parametrize("proposed", [Incarnation(1, 8), Incarnation(2, 8), Incarnation(2, 9)])
@pytest.mark.asyncio
async def test_a_number_that_was_granted_before_is_answered_and_nothing_is_entered(
    membership: Membership, proposed: Incarnation
) -> None:
    """Numbers count over all terms: who asks hears above which one to propose."""
    known = Incarnation(1, 9)
    await enter(membership, known)
    await until(lambda: are_silent(membership, "a"))
    assert await membership.grant_incarnation("a", proposed) == known
    assert await alive(membership) == {"a": known}
    assert await are_silent(membership, "a"), "nor is it a heartbeat"


@pytest.mark.asyncio
async def test_a_grant_carried_out_twice_leaves_what_it_granted(membership: Membership) -> None:
    life = Incarnation(2, 4)
    await enter(membership, life, life)
    assert await alive(membership) == {"a": life}


@pytest.mark.asyncio
async def test_a_grant_carried_out_after_its_leader_granted_by_itself_changes_nothing(
    membership: Membership,
) -> None:
    """Heartbeats have brought what the leader granted, or the life after it."""
    by_itself = Incarnation(1, 2)
    await membership.heartbeat({"a": by_itself}, 1)
    await membership.grant_incarnation("a", by_itself)
    assert await alive(membership) == {"a": by_itself}
    await membership.heartbeat({"a": Incarnation(1, 3)}, 1)
    await membership.grant_incarnation("a", by_itself)
    assert await alive(membership) == {"a": Incarnation(1, 3)}


@pytest.mark.asyncio
async def test_a_grant_carried_out_before_the_heartbeat_of_it_is_the_same_life(
    membership: Membership,
) -> None:
    await enter(membership, ONE, Incarnation(1, 2))
    await membership.heartbeat({"a": Incarnation(1, 2)}, 1)
    assert await alive(membership) == {"a": Incarnation(1, 2)}


@pytest.mark.asyncio
async def test_a_grant_carried_out_after_a_take_over_is_refused(
    keeper: Keeper, membership: Membership
) -> None:
    await membership.heartbeat({"a": ONE}, 1)
    await take(keeper.lease(), claim_of(keeper, 2))
    with pytest.raises(DilocoError) as caught:
        await membership.grant_incarnation("a", Incarnation(1, 2))
    assert caught.value.reason is Reason.STALE_TERM
    assert await alive(membership) == {"a": ONE}


@pytest.mark.asyncio
async def test_a_late_grant_in_an_emptied_keeper_is_overtaken_by_the_next_heartbeat(
    keeper: Keeper, membership: Membership
) -> None:
    granted = Incarnation(2, 3)
    await enter(membership, granted)
    keeper.empty()
    await enter(membership, Incarnation(1, 2))  # of the leader before, late
    await membership.heartbeat({"a": granted}, 2)
    assert await alive(membership) == {"a": granted}


@pytest.mark.asyncio
async def test_of_grants_in_any_order_the_latest_life_stays(membership: Membership) -> None:
    numbers = (3, 11, 7, 20, 1, 19, 2, 12)
    await asyncio.gather(
        *(membership.grant_incarnation("a", Incarnation(1, number)) for number in numbers)
    )
    assert await alive(membership) == {"a": Incarnation(1, 20)}


@pytest.mark.asyncio
async def test_a_leader_whose_term_is_over_grants_nothing(membership: Membership) -> None:
    await enter(membership, Incarnation(5, 1))
    with pytest.raises(DilocoError, match=r"5\.1.*term 4 is over") as caught:
        await membership.grant_incarnation("a", Incarnation(4, 2))
    assert caught.value.reason is Reason.STALE_TERM
    assert await alive(membership) == {"a": Incarnation(5, 1)}


@pytest.mark.asyncio
async def test_large_numbers_stay_exact(membership: Membership) -> None:
    large = Incarnation(2**52, 2**52 + 1)
    await enter(membership, Incarnation(2**52, 2**52), large)
    assert await membership.grant_incarnation("a", Incarnation(2**52, 2**52)) == large
    assert await alive(membership) == {"a": large}


@pytest.mark.asyncio
async def test_an_older_incarnation_never_overwrites_a_newer_one(membership: Membership) -> None:
    new = Incarnation(2, 5)
    await enter(membership, new)
    for old in (Incarnation(1, 9), Incarnation(2, 4)):
        await membership.heartbeat({"a": old, "b": Incarnation(1, 1)}, 3)
        assert await alive(membership) == {"a": new, "b": Incarnation(1, 1)}
    await membership.heartbeat({"a": Incarnation(3, 6)}, 3)
    assert (await alive(membership))["a"] == Incarnation(3, 6)


@pytest.mark.asyncio
async def test_the_heartbeat_of_a_fenced_incarnation_does_not_keep_the_learner_alive(
    membership: Membership,
) -> None:
    await enter(membership, Incarnation(1, 2))
    fenced = Incarnation(1, 1)

    async def aged() -> bool:
        await membership.heartbeat({"a": fenced}, 3)
        (member,) = await membership.members()
        return member.age_s > 0.05

    await until(aged)


async def are_silent(membership: Membership, *learner_ids: str) -> bool:
    silent = [x.learner_id for x in await membership.members() if x.age_s > 0.02]
    return set(learner_ids) <= set(silent)


@pytest.mark.asyncio
async def test_the_silent_are_removed_longest_unheard_first_and_return_by_a_heartbeat(
    membership: Membership,
) -> None:
    await membership.heartbeat({"z": ONE}, 1)
    await until(lambda: are_silent(membership, "z"))
    await membership.heartbeat({"a": Incarnation(1, 2)}, 1)
    await until(lambda: are_silent(membership, "a", "z"))
    assert [m.learner_id for m in await membership.members()] == ["z", "a"]
    assert await membership.expire(3600.0, 1) == []
    gone = await membership.expire(0.02, 1)
    assert [(x.learner_id, x.incarnation) for x in gone] == [("z", ONE), ("a", Incarnation(1, 2))]
    assert gone[0].age_s > gone[1].age_s > 0.02
    assert await membership.members() == []
    assert await membership.expire(0.02, 1) == []
    await membership.heartbeat({"z": ONE}, 1)
    assert await alive(membership) == {"z": ONE}
    assert await membership.grant_incarnation("a", ONE) == Incarnation(1, 2), "it stays known"


@pytest.mark.asyncio
async def test_who_was_heard_in_time_stays(membership: Membership) -> None:
    await membership.heartbeat({"a": ONE, "b": ONE}, 1)
    await until(lambda: are_silent(membership, "a", "b"))
    (age_s,) = (x.age_s for x in await membership.members() if x.learner_id == "a")
    await membership.heartbeat({"b": ONE}, 1)
    assert [x.learner_id for x in await membership.expire(age_s, 1)] == ["a"]
    assert await alive(membership) == {"b": ONE}


@pytest.mark.asyncio
async def test_remove_takes_only_the_current_incarnation_and_keeps_its_number(
    membership: Membership,
) -> None:
    first, second = ONE, Incarnation(1, 2)
    await enter(membership, first, second)
    assert not await membership.remove("a", first, 1)
    assert await alive(membership) == {"a": second}
    assert await membership.remove("a", second, 1)
    assert not await membership.remove("a", second, 1)
    assert await alive(membership) == {}
    assert await membership.grant_incarnation("a", first) == second


@pytest.mark.asyncio
async def test_a_removed_learner_that_is_heard_again_is_a_member_again(
    membership: Membership,
) -> None:
    await enter(membership, ONE)
    await membership.remove("a", ONE, 1)
    await membership.heartbeat({"a": ONE}, 3)
    assert await alive(membership) == {"a": ONE}


@pytest.mark.asyncio
async def test_quorum_is_what_was_set_last_and_never_below_one(membership: Membership) -> None:
    await membership.set_quorum(3, 1)
    await membership.set_quorum(2, 1)
    assert (await membership.read_back()).quorum == 2
    with pytest.raises(UsageError) as caught:
        await membership.set_quorum(0, 1)
    assert caught.value.reason is Reason.CONFIG_INVALID
    assert (await membership.read_back()).quorum == 2


@pytest.mark.asyncio
async def test_only_the_first_seeding_counts(membership: Membership) -> None:
    assert await membership.mark_seeded(1)
    assert not await membership.mark_seeded(1)
    assert not await membership.mark_seeded(2)
    assert await membership.is_seeded()


@pytest.mark.asyncio
async def test_a_large_batch_with_odd_names_comes_back_whole(membership: Membership) -> None:
    batch = {f"learner {i} é{{}}:*": Incarnation(1 + i % 3, i + 1) for i in range(3000)}
    await membership.heartbeat(batch, 3)
    assert await alive(membership) == batch


@pytest.mark.asyncio
async def test_a_take_over_reads_members_quorum_and_seed_back_in_one_piece(
    membership: Membership, keeper: Keeper
) -> None:
    await membership.heartbeat({"z": Incarnation(2, 7)}, 2)
    await until(lambda: are_silent(membership, "z"))
    granted = Incarnation(2, 1)
    await enter(membership, granted)
    await enter(membership, granted, learner_id="left")
    assert await membership.remove("left", Incarnation(2, 1), 2)
    roll = await keeper.membership().read_back()
    assert [(x.learner_id, x.incarnation) for x in roll.members] == [
        ("z", Incarnation(2, 7)),
        ("a", granted),
    ]
    assert roll.members[0].age_s > 0.02
    assert (roll.quorum, roll.seeded) == (None, False)
    await membership.set_quorum(5, 2)
    assert not (await keeper.membership().read_back()).seeded
    await membership.mark_seeded(2)
    roll = await keeper.membership().read_back()
    assert (roll.quorum, roll.seeded) == (5, True)


WRITES: dict[str, Callable[[Membership, int], Awaitable[object]]] = {
    "grant_incarnation": lambda m, term: m.grant_incarnation("new", Incarnation(term, 1)),
    "heartbeat": lambda m, term: m.heartbeat({"a": Incarnation(9, 9), "new": ONE}, term),
    "expire": lambda m, term: m.expire(-1.0, term),
    "remove": lambda m, term: m.remove("a", ONE, term),
    "set_quorum": lambda m, term: m.set_quorum(7, term),
    "mark_seeded": lambda m, term: m.mark_seeded(term),
}
every_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())


async def state_of(membership: Membership) -> tuple[dict[str, Incarnation], int | None, bool]:
    roll = await membership.read_back()
    return {x.learner_id: x.incarnation for x in roll.members}, roll.quorum, roll.seeded


@every_write
@pytest.mark.asyncio
async def test_a_writer_whose_term_is_over_writes_nothing_and_hears_why(
    keeper: Keeper,
    membership: Membership,
    write: Callable[[Membership, int], Awaitable[object]],
) -> None:
    await membership.heartbeat({"a": ONE}, 1)
    await take(keeper.lease(), claim_of(keeper, 5))
    before = await state_of(membership)
    with pytest.raises(DilocoError, match=r"term 4.*knows term 5.*term 4 is over") as caught:
        await write(membership, 4)
    assert caught.value.reason is Reason.STALE_TERM
    assert await state_of(membership) == before
    keeper.run_out()
    with pytest.raises(DilocoError):  # the lease ran out, the term did not
        await write(membership, 4)


@every_write
@pytest.mark.parametrize("how", ["same term", "higher term", "no lease", "emptied"])
@pytest.mark.asyncio
async def test_a_writer_of_the_term_and_everybody_where_no_term_is_known_may_write(
    keeper: Keeper,
    membership: Membership,
    write: Callable[[Membership, int], Awaitable[object]],
    how: str,
) -> None:
    if how != "no lease":
        await take(keeper.lease(), claim_of(keeper, 5))
    if how == "emptied":
        keeper.empty()
    term = {"same term": 5, "higher term": 6}.get(how, 4)
    await membership.heartbeat({"a": ONE}, term)
    before = await state_of(membership)
    await write(membership, term)
    assert await state_of(membership) != before


@pytest.mark.asyncio
async def test_terms_up_to_the_largest_exact_number_are_compared_exactly(
    keeper: Keeper, membership: Membership
) -> None:
    await take(keeper.lease(), claim_of(keeper, MAX_TERM))
    await membership.heartbeat({"a": ONE}, MAX_TERM)
    with pytest.raises(DilocoError) as caught:
        await membership.heartbeat({"a": ONE}, MAX_TERM - 1)
    assert caught.value.reason is Reason.STALE_TERM


@pytest.mark.asyncio
async def test_an_emptied_keeper_is_filled_by_the_next_heartbeat(
    keeper: Keeper, membership: Membership
) -> None:
    claim = claim_of(keeper, 3)
    await take(keeper.lease(), claim)
    batch = {"a": Incarnation(2, 5), "b": Incarnation(3, 1)}
    await membership.heartbeat(batch, 3)
    keeper.empty()
    assert await alive(membership) == {}
    await prolong(keeper.lease(), claim)
    with pytest.raises(DilocoError):
        await membership.heartbeat({"a": Incarnation(2, 4)}, 2)
    await membership.heartbeat(batch, 3)
    assert await alive(membership) == batch
    await membership.heartbeat({"a": Incarnation(2, 4)}, 3)
    assert await alive(membership) == batch
    assert await membership.grant_incarnation("a", Incarnation(3, 4)) == Incarnation(2, 5)


@pytest.mark.asyncio
async def test_memory_measures_age_by_the_clock_it_was_given() -> None:
    now = 100.0
    membership = MemoryMembership(clock=lambda: now)
    await membership.heartbeat({"a": ONE}, 1)
    now = 107.5
    (member,) = await membership.members()
    assert member.age_s == 7.5
    assert await membership.expire(7.5, 1) == []
    assert await membership.expire(7.4, 1) == [member]
