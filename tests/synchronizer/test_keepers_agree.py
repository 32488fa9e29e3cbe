"""Whatever is asked in whatever order: Redis answers as the keeper in memory does."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.errors import DilocoError
from decoupled_diloco.versions import Incarnation
from synchronizer_server.membership import (
    LeaseKeeper,
    LeaseView,
    Member,
    Membership,
)
from tests.synchronizer.keepers import (
    Keeper,
    MemoryKeeper,
    RedisKeeper,
    claim_of,
    keeper_in,
    prolong,
    take,
)
from tests.synchronizer.redis_server import RedisServer, running_redis

terms = st.integers(1, 4)
names = st.sampled_from("ab")
sets = st.sets(names).map(tuple)
lives = st.builds(Incarnation, st.integers(1, 3), st.integers(1, 3))
steps = st.one_of(
    st.tuples(st.just("acquire"), terms, names, names),
    st.tuples(st.just("renew"), terms, names, sets, st.integers(0, 3)),
    st.tuples(st.just("set_in_sync"), terms, names, sets, st.integers(1, 3)),
    st.tuples(st.just("release"), terms, names),
    st.tuples(st.just("run_out")),
    st.tuples(st.just("empty")),
    st.tuples(st.just("grant"), names, lives),
    st.tuples(st.just("heartbeat"), terms, st.dictionaries(names, lives)),
    st.tuples(st.just("remove"), terms, names, lives),
    st.tuples(st.just("expire"), terms, st.sampled_from([-1.0, 3600.0])),
    st.tuples(st.just("set_quorum"), terms, st.integers(0, 2)),
    st.tuples(st.just("mark_seeded"), terms),
)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


async def do(keeper: Keeper, lease: LeaseKeeper, members: Membership, step: tuple[Any, ...]) -> Any:
    match step:
        case ("acquire", term, name, standby_id):
            return await take(lease, claim_of(keeper, term, name), standby_id=standby_id)
        case ("renew", term, name, in_sync, revision):
            claim = claim_of(keeper, term, name)
            return await prolong(lease, claim, in_sync=in_sync, revision=revision)
        case ("set_in_sync", term, name, ids, revision):
            claim = claim_of(keeper, term, name)
            return await lease.set_in_sync(claim, ids, revision=revision)
        case ("release", term, name):
            return await lease.release(claim_of(keeper, term, name))
        case ("run_out",):
            return keeper.run_out()
        case ("empty",):
            return keeper.empty()
        case ("grant", name, proposed):
            return await members.grant_incarnation(name, proposed)
        case ("heartbeat", term, batch):
            return await members.heartbeat(batch, term)
        case ("remove", term, name, life):
            return await members.remove(name, life, term)
        case ("expire", term, older_than_s):
            return await members.expire(older_than_s, term)
        case ("set_quorum", term, quorum):
            return await members.set_quorum(quorum, term)
        case ("mark_seeded", term):
            return await members.mark_seeded(term)
    raise AssertionError(step)


def timeless(answer: Any) -> Any:
    """An answer without what two clocks differ in: times, and the order that they make."""
    if isinstance(answer, LeaseView):
        assert (answer.remaining_s > 0) == (answer.holder is not None)
        return dataclasses.replace(answer, remaining_s=0.0)
    if isinstance(answer, list | tuple) and all(isinstance(x, Member) for x in answer):
        return {(x.learner_id, x.incarnation) for x in answer}
    return answer


async def answers(keeper: Keeper, script: list[tuple[Any, ...]]) -> list[Any]:
    lease, members = keeper.lease(), keeper.membership()
    result = []
    for step in script:
        try:
            answer = timeless(await do(keeper, lease, members, step))
        except DilocoError as error:
            answer = (error.reason, error.message)
        roll = await members.read_back()
        assert roll.seeded == await members.is_seeded()
        state = (timeless(await lease.read()), timeless(roll.members), roll.quorum, roll.seeded)
        result.append((step, answer, state))
    return result


@pytest.mark.redis
@settings(max_examples=100)
@given(script=st.lists(steps, max_size=25))
def test_both_keepers_answer_alike(redis_server: RedisServer, script: list[Any]) -> None:
    async def both() -> tuple[list[Any], list[Any]]:
        async with keeper_in(redis_server) as redis:
            assert isinstance(redis, RedisKeeper)
            return (
                await answers(MemoryKeeper(run_id=redis.run_id), script),
                await answers(redis, script),
            )

    in_memory, in_redis = asyncio.run(both())
    assert in_redis == in_memory


@settings(max_examples=200)
@given(script=st.lists(steps, max_size=25))
def test_a_term_is_taken_once_and_never_goes_back(script: list[Any]) -> None:
    """Without emptying: the keeper's term only rises, and no term ever has two holders."""

    async def run() -> None:
        keeper = MemoryKeeper()
        lease, members = keeper.lease(), keeper.membership()
        highest, holders = 0, dict[int, str]()
        for step in script:
            if step[0] in ("empty", "renew"):
                continue
            try:
                await do(keeper, lease, members, step)
            except DilocoError:
                continue
            view = await lease.read()
            assert view.term >= highest
            highest = view.term
            if view.holder is not None:
                assert view.holder.term == view.term
                assert holders.setdefault(view.term, view.holder.leader_id) == view.holder.leader_id

    asyncio.run(run())
