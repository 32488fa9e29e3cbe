"""One conformance suite for both keepers of the lease: in memory, and in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.membership import LeaseView
from synchronizer_server.membership.redis_client import MAX_TERM
from tests.synchronizer.keepers import LONG_S, Keeper, claim_of, keeper_in, prolong, take, until
from tests.synchronizer.redis_server import RedisServer, running_redis

NOTHING = LeaseView(holder=None, address="", remaining_s=0.0, term=0, in_sync=None)


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


pytestmark = pytest.mark.asyncio


async def test_a_new_keeper_knows_nothing(keeper: Keeper) -> None:
    assert await keeper.lease().read() == NOTHING


async def test_the_first_bid_takes_the_lease_and_everybody_reads_it(keeper: Keeper) -> None:
    claim = claim_of(keeper, 3)
    taken = await take(keeper.lease(), claim)
    seen = await keeper.lease().read()
    for view in (taken, seen):
        assert (view.holder, view.address, view.term) == (claim, "a:1", 3)
        assert view.in_sync == {"a"}, "the store of the leader"
        assert 0 < view.remaining_s <= LONG_S


async def test_a_signature_and_odd_texts_come_back_byte_for_byte(keeper: Keeper) -> None:
    claim = claim_of(keeper, MAX_TERM, "leader é:{}\"'\\ *")
    view = await take(keeper.lease(), claim)
    assert view.holder == claim
    assert view.term == MAX_TERM
    odd = ['é"\\[]', "b:{}"]
    assert await keeper.lease().set_in_sync(claim, odd, revision=1)
    assert (await keeper.lease().read()).in_sync == frozenset(odd)


async def test_a_claim_without_a_signature_is_kept_as_it_is(keeper: Keeper) -> None:
    claim = claim_of(keeper, 1).signed_with(b"")
    assert (await take(keeper.lease(), claim)).holder == claim


async def test_a_lease_that_is_held_is_taken_by_nobody_else(keeper: Keeper) -> None:
    first = claim_of(keeper, 1)
    await take(keeper.lease(), first)
    await keeper.lease().set_in_sync(first, ["b"], revision=1)
    view = await take(keeper.lease(), claim_of(keeper, 2, "b"))
    assert (view.holder, view.term, view.in_sync) == (first, 1, {"b"})
    view = await prolong(keeper.lease(), claim_of(keeper, 2, "b"))
    assert (view.holder, view.term) == (first, 1)


async def test_who_differs_in_one_field_alone_is_somebody_else(keeper: Keeper) -> None:
    first = claim_of(keeper, 5)
    await take(keeper.lease(), first)
    for other in (
        claim_of(keeper, 5, "b"),
        claim_of(keeper, 6),
        claim_of(keeper, 5).signed_with(b"another"),
    ):
        assert (await prolong(keeper.lease(), other)).holder == first
        assert not await keeper.lease().set_in_sync(other, ["x"], revision=1)
        await keeper.lease().release(other)
    view = await keeper.lease().read()
    assert (view.holder, view.in_sync) == (first, {"a"})


async def test_only_a_standby_in_sync_follows_and_only_with_a_higher_term(keeper: Keeper) -> None:
    first = claim_of(keeper, 4)
    await take(keeper.lease(), first)
    await keeper.lease().set_in_sync(first, ["b"], revision=1)
    keeper.run_out()
    assert (await take(keeper.lease(), claim_of(keeper, 5, "c"))).holder is None
    for term in (3, 4):
        assert (await take(keeper.lease(), claim_of(keeper, term, "b"))).holder is None
    view = await keeper.lease().read()
    assert (view.term, view.in_sync) == (4, {"b"}), "what is refused changes nothing"
    second = claim_of(keeper, 9, "b")
    view = await take(keeper.lease(), second)
    assert (view.holder, view.term, view.in_sync) == (second, 9, {"b"})


async def test_taking_over_keeps_who_is_in_sync_until_the_new_holder_says_otherwise(
    keeper: Keeper,
) -> None:
    """Where it dies before it has begun its term, another one that is named leads."""
    first = claim_of(keeper, 1)
    await take(keeper.lease(), first)
    await keeper.lease().set_in_sync(first, ["a", "b", "c"], revision=17)
    await keeper.lease().release(first)
    dies = claim_of(keeper, 2, "b")
    view = await take(keeper.lease(), dies)
    assert (view.holder, view.term, view.in_sync) == (dies, 2, {"a", "b", "c"})
    assert not await keeper.lease().set_in_sync(first, ["a"], revision=18), "a term that is over"
    keeper.run_out()
    third = claim_of(keeper, 3, "c")
    assert (await take(keeper.lease(), third)).holder == third
    assert not await keeper.lease().set_in_sync(dies, ["b"], revision=1)
    assert await keeper.lease().set_in_sync(third, ["c"], revision=1), "numbers begin anew"
    assert (await keeper.lease().read()).in_sync == {"c"}
    keeper.run_out()
    assert (await take(keeper.lease(), claim_of(keeper, 4, "b"))).holder is None


async def test_the_standby_id_need_not_be_the_leader_id(keeper: Keeper) -> None:
    first = claim_of(keeper, 1)
    await take(keeper.lease(), first)
    await keeper.lease().set_in_sync(first, ["standby-1"], revision=1)
    await keeper.lease().release(first)
    second = claim_of(keeper, 2, "random")
    assert (await take(keeper.lease(), second, standby_id="standby-1")).holder == second


async def test_bidding_again_with_the_lease_in_hand_prolongs_it(keeper: Keeper) -> None:
    claim = claim_of(keeper, 2)
    lease = keeper.lease()
    await take(lease, claim, timeout_s=100.0)
    await lease.set_in_sync(claim, ["b"], revision=1)
    view = await take(lease, claim, timeout_s=LONG_S)
    assert view.holder == claim
    assert view.remaining_s > 100.0
    assert (view.term, view.in_sync) == (2, {"b"})


async def test_a_renewal_prolongs_and_tells_a_new_address(keeper: Keeper) -> None:
    claim = claim_of(keeper, 2)
    lease = keeper.lease()
    await take(lease, claim, timeout_s=100.0)
    await lease.set_in_sync(claim, ["b"], revision=1)
    view = await lease.renew(claim, address="moved:2", timeout_s=LONG_S, in_sync=["c"], revision=1)
    assert (view.holder, view.address) == (claim, "moved:2")
    assert view.remaining_s > 100.0
    assert view.in_sync == {"b"}, "a renewal writes it in an emptied keeper alone"


async def test_a_lease_runs_out_by_itself_and_its_holder_may_take_it_again(keeper: Keeper) -> None:
    claim = claim_of(keeper, 2)
    lease = keeper.lease()
    await take(lease, claim, timeout_s=0.02)
    await lease.set_in_sync(claim, ["b"], revision=1)

    async def is_over() -> bool:
        return (await lease.read()).holder is None

    await until(is_over)
    view = await lease.read()
    assert (view.address, view.remaining_s, view.term, view.in_sync) == ("", 0.0, 2, {"b"})
    view = await prolong(lease, claim)
    assert (view.holder, view.term, view.in_sync) == (claim, 2, {"b"})


async def test_a_holder_that_was_frozen_gets_nothing_once_another_has_followed(
    keeper: Keeper,
) -> None:
    frozen, follower = keeper.lease(), keeper.lease()
    old, new = claim_of(keeper, 1, "a"), claim_of(keeper, 2, "b")
    await take(frozen, old, timeout_s=0.02)
    await frozen.set_in_sync(old, ["b"], revision=1)

    async def has_followed() -> bool:
        return (await take(follower, new)).holder == new

    await until(has_followed)
    assert (await prolong(frozen, old)).holder == new
    assert (await take(frozen, old)).holder == new
    assert not await frozen.set_in_sync(old, ["a"], revision=1)
    await frozen.release(old)
    with pytest.raises(DilocoError) as caught:
        await keeper.membership().mark_seeded(1)
    assert caught.value.reason is Reason.STALE_TERM
    view = await frozen.read()
    assert (view.holder, view.term, view.in_sync) == (new, 2, {"b"})
    keeper.run_out()
    assert (await prolong(frozen, old)).holder is None, "its term is over, lease or not"


async def test_what_is_released_is_free_and_term_and_standbys_stay(keeper: Keeper) -> None:
    claim = claim_of(keeper, 7)
    lease = keeper.lease()
    await take(lease, claim)
    await lease.set_in_sync(claim, ["b"], revision=1)
    await lease.release(claim)
    await lease.release(claim)
    view = await lease.read()
    assert (view.holder, view.term, view.in_sync) == (None, 7, {"b"})
    assert await lease.set_in_sync(claim, ["c"], revision=1), "the term is its own still"


async def test_a_write_that_was_held_up_does_not_undo_a_later_one(keeper: Keeper) -> None:
    claim = claim_of(keeper, 1)
    lease = keeper.lease()
    await take(lease, claim)
    assert await lease.set_in_sync(claim, ["a", "b"], revision=7)
    assert await lease.set_in_sync(claim, ["a"], revision=8)
    assert not await lease.set_in_sync(claim, ["a", "b"], revision=7)
    assert (await lease.read()).in_sync == {"a"}
    keeper.run_out()
    second = claim_of(keeper, 2, "a")
    await take(lease, second)
    assert await lease.set_in_sync(second, ["a", "c"], revision=1), "numbers begin anew with a term"


async def test_a_leader_without_the_rounds_leaves_nothing_behind(keeper: Keeper) -> None:
    claim = claim_of(keeper, 4)
    lease = keeper.lease()
    await take(lease, claim)
    await lease.release(claim_of(keeper, 3), forget=True)
    assert (await lease.read()).holder == claim, "somebody else's word changes nothing"
    await lease.release(claim, forget=True)
    view = await lease.read()
    assert (view.holder, view.in_sync) == (None, None), "nothing is known of the run"
    assert view.term > claim.term, "the next term is above what was held up on its way"
    late = claim_of(keeper, view.term, "b")
    assert (await take(lease, late)).holder is None, "a term is not granted twice"
    fresh = claim_of(keeper, view.term + 1, "b")
    view = await take(lease, fresh)
    assert (view.holder, view.in_sync) == (fresh, {"b"})


async def test_a_leader_without_the_rounds_may_say_so_after_its_lease_has_run_out(
    keeper: Keeper,
) -> None:
    """Its first word may have been lost, and its store alone is named: nobody else may lead."""
    claim = claim_of(keeper, 4)
    lease = keeper.lease()
    await take(lease, claim)
    keeper.run_out()
    await lease.release(claim_of(keeper, 3), forget=True)
    assert (await lease.read()).term == 4, "not for a term before"
    await lease.release(claim)
    assert (await lease.read()).in_sync is not None, "only where it asks for that"
    await lease.release(claim, forget=True)
    view = await lease.read()
    assert (view.holder, view.in_sync, view.term) == (None, None, 5)
    higher = claim_of(keeper, 6, "b")
    await take(lease, higher)
    await lease.release(claim, forget=True)
    view = await lease.read()
    assert (view.holder, view.in_sync) == (higher, {"b"}), "too late: another one leads"


async def test_what_a_leader_asked_before_it_forgot_changes_nothing_afterwards(
    keeper: Keeper,
) -> None:
    claim = claim_of(keeper, 4)
    lease = keeper.lease()
    await take(lease, claim)
    await lease.release(claim, forget=True)
    left = await lease.read()
    assert not await lease.set_in_sync(claim, ["a"], revision=1)
    assert (await prolong(lease, claim, in_sync=("a",))).holder is None
    assert (await take(lease, claim)).holder is None
    assert await lease.read() == left
    higher = claim_of(keeper, 9, "b")
    assert (await prolong(lease, higher, in_sync=("b",))).holder == higher, "one of a later term"


async def test_nobody_in_sync_is_not_the_same_as_nothing_known(keeper: Keeper) -> None:
    claim = claim_of(keeper, 1)
    lease = keeper.lease()
    await take(lease, claim)
    await lease.set_in_sync(claim, [], revision=1)
    await lease.release(claim)
    assert (await lease.read()).in_sync == frozenset()
    assert (await take(lease, claim_of(keeper, 2, "b"))).holder is None
    keeper.empty()
    assert await lease.read() == NOTHING
    second = claim_of(keeper, 2, "b")
    assert (await take(lease, second)).holder == second


async def test_an_emptied_keeper_is_told_everything_by_the_next_renewal(keeper: Keeper) -> None:
    claim = claim_of(keeper, 3)
    lease = keeper.lease()
    await take(lease, claim)
    keeper.empty()
    view = await prolong(lease, claim, in_sync=("b", "c"))
    assert (view.holder, view.term, view.in_sync) == (claim, 3, {"b", "c"})
    assert view.remaining_s > 0
    with pytest.raises(DilocoError):
        await keeper.membership().mark_seeded(2)


async def test_a_write_held_up_since_before_the_keeper_was_emptied_undoes_no_renewal(
    keeper: Keeper,
) -> None:
    claim = claim_of(keeper, 3)
    await take(keeper.lease(), claim, standby_id="a")
    assert await keeper.lease().set_in_sync(claim, ["a"], revision=5)
    keeper.empty()
    assert (await prolong(keeper.lease(), claim, in_sync=("a",), revision=5)).holder == claim
    assert not await keeper.lease().set_in_sync(claim, ["a", "b"], revision=4)
    assert (await keeper.lease().read()).in_sync == frozenset({"a"})
    assert await keeper.lease().set_in_sync(claim, ["a", "c"], revision=6)


async def test_an_emptied_keeper_hears_of_standbys_without_a_lease(keeper: Keeper) -> None:
    claim = claim_of(keeper, 3)
    lease = keeper.lease()
    await take(lease, claim)
    keeper.empty()
    assert await lease.set_in_sync(claim, ["b"], revision=1)
    view = await lease.read()
    assert (view.holder, view.term, view.in_sync) == (None, 3, {"b"})
    assert not await lease.set_in_sync(claim_of(keeper, 2), ["x"], revision=1)
    assert not await lease.set_in_sync(claim_of(keeper, 4), ["x"], revision=1)


async def test_two_contenders_race_and_exactly_one_wins_each_term(keeper: Keeper) -> None:
    lease = {name: keeper.lease() for name in "ab"}
    winners = []
    for term in range(1, 201):
        claims = {name: claim_of(keeper, term, name) for name in "ab"}
        names = "ab" if term % 2 else "ba"
        views = await asyncio.gather(*(take(lease[x], claims[x]) for x in names))
        won = [x for x, view in zip(names, views, strict=True) if view.holder == claims[x]]
        assert len(won) == 1, f"term {term}: {won}"
        (winner,) = won
        assert {view.holder for view in views} <= {claims[winner]}, "both hear who won"
        assert all(view.term == term for view in views)
        winners.append(winner)
        assert await lease[winner].set_in_sync(claims[winner], ["a", "b"], revision=1)
        await lease[winner].release(claims[winner])
    assert set(winners) == {"a", "b"}


async def test_closing_again_does_nothing(keeper: Keeper) -> None:
    lease = keeper.lease()
    await lease.read()
    await lease.aclose()
    await lease.aclose()
