"""A record of a large fleet is larger than any other message may be, and still gets across."""

from __future__ import annotations

import dataclasses

import pytest

from decoupled_diloco.channel import MAX_MESSAGE_BYTES
from decoupled_diloco.versions import Incarnation
from synchronizer_server.joining import MAX_LEARNERS
from tests.synchronizer.replication_kit import Lineage, Standby, leading


@pytest.mark.asyncio
async def test_a_record_of_as_many_learners_as_may_be_is_replicated() -> None:
    lineage = Lineage()
    names = [f"{i:05}".ljust(100, "x") for i in range(MAX_LEARNERS)]
    numbers = {name: i for i, name in enumerate(names)}
    lives = dict.fromkeys(names, Incarnation(1, 1))
    lineage.record = dataclasses.replace(
        lineage.record,
        incarnations=lives,
        shards=numbers,
        local_steps=numbers,
        num_tokens_merged=sum(numbers.values()),
        tokens_merged_by_learner=numbers,
        tokens_processed_by_learner=numbers,
    )
    async with leading(lineage) as led, Standby().following(led.address) as standby:
        for _ in range(2):
            led.send(lineage.round())
        assert len(lineage.record.to_json()) > MAX_MESSAGE_BYTES
        await standby.has(lineage)
