"""A learner that reports absurd numbers of tokens spoils no record."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoupled_diloco.wire import MAX_COUNT
from synchronizer_server.store import DiskStore
from tests.synchronizer.fake_learner import ACCEPTED, Fleet, make_settings, until

pytestmark = pytest.mark.asyncio

_SPOILS = 1 + 2**63 // MAX_COUNT
"""Reports of as many tokens as one may claim, whose sum no longer fits into a record."""


@pytest.mark.parametrize("durability", ["disk", "async"])
async def test_reports_whose_sum_no_record_can_hold_cost_no_round(
    tmp_path: Path, durability: str
) -> None:
    def fleet() -> Fleet:
        store = DiskStore(tmp_path / "store", "run", durability=durability)
        return Fleet(settings=make_settings(num_learners=2, grace=False), store=store)

    first = await fleet().start()
    _, evil = await first.seeded("honest", "evil")
    for _ in range(_SPOILS):
        await evil.step(MAX_COUNT)
    roster = first.engine.core.state.roster
    await until(lambda: roster.find("evil").local_step == _SPOILS)
    assert (await evil.push(await evil.hear("pull"))).outcome == ACCEPTED
    await first.committed_is(1)
    committed = (await first.status()).global_step
    await first.stop(drain=False)

    again = await fleet().start()
    assert again.committed == committed
    assert again.engine.core.state.roster.find("evil").num_tokens == MAX_COUNT
    await again.stop()
