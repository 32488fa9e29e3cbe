"""What the two threads share: copies, bases and updates, without either thread."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import Strategy, TensorSpec, build_layout
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.versions import Incarnation, Version
from learner_client.captures import PushWork
from learner_client.core.learner_core import AnswerDecline, LearnerCore, PullRequest
from learner_client.exchange import Exchange
from learner_client.grants import Grant, Update

LAYOUT = build_layout(
    [TensorSpec(name=f"t{i}", shape=(4,), dtype="float32") for i in range(4)],
    strategy=Strategy.BALANCED,
    num_fragments=4,
    overlap=1,
)


def update(fragment: int, global_step: int, value: float = 0.0) -> Update:
    digest = bytes([global_step, int(value)]) * 16
    return Update(
        fragment=fragment,
        version=Version(1, global_step, digest),
        vector=torch.full((4,), value),
    )


def pull(fragment: int) -> PullRequest:
    return PullRequest(term=1, group=0, global_step=1, fragment=fragment)


def make_exchange() -> Exchange:
    exchange = Exchange("learner-0")
    exchange.begin(LearnerCore(num_fragments=4, overlap=1), LAYOUT, {})
    exchange.granted(
        Grant(
            incarnation=Incarnation(1, 1),
            term=1,
            settings=RunSettings(num_fragments=4, overlap=1),
            shard=0,
            local_step=0,
            global_step=0,
            seed=False,
        )
    )
    for fragment in range(4):
        exchange.offer(update(fragment, 0, fragment))
    for item in exchange.take_updates():
        exchange.applied(item)
    return exchange


def step(exchange: Exchange, value: float) -> None:
    """One boundary; every copy that is due gets ``value``."""
    for item in exchange.count(1):
        exchange.applied(item)
    captures = exchange.to_copy()
    for capture in captures:
        capture.vector.fill_(value)
    exchange.copied(captures)


def test_a_copy_that_is_being_read_is_never_written():
    exchange = make_exchange()
    step(exchange, 1.0)
    work = exchange.pull(pull(1))
    assert isinstance(work, PushWork)
    for value in range(2, 9):
        step(exchange, float(value))
        assert work.capture.vector.tolist() == [1.0] * 4
    newer = exchange.pull(pull(1))
    assert isinstance(newer, PushWork)
    assert newer.capture.vector.tolist() == [8.0] * 4
    assert newer.answer.counters.num_steps == 8


def test_buffers_are_used_again_once_nobody_reads_them():
    exchange = make_exchange()
    buffers = set()
    for value in range(20):
        step(exchange, float(value))
        work = exchange.pull(pull(1))
        assert isinstance(work, PushWork)
        buffers.add(work.capture.buffer.data_ptr())
        exchange.release(work.capture)
    assert len(buffers) <= 4


def test_two_readers_hold_a_buffer_until_both_are_done():
    exchange = make_exchange()
    step(exchange, 1.0)
    first, second = exchange.pull(pull(1)), exchange.pull(pull(1))
    assert isinstance(first, PushWork)
    assert isinstance(second, PushWork)
    exchange.release(first.capture)
    for _ in range(5):
        step(exchange, 9.0)
    assert second.capture.vector.tolist() == [1.0] * 4


def test_the_base_is_what_was_applied_and_stays_while_a_push_is_made_of_it():
    exchange = make_exchange()
    step(exchange, 1.0)
    exchange.offer(update(1, 1, 50.0))
    work = exchange.pull(pull(1))
    assert isinstance(work, PushWork)
    assert work.base.tolist() == [1.0] * 4
    step(exchange, 2.0)
    assert work.base.tolist() == [1.0] * 4
    assert exchange.bases[1].tolist() == [50.0] * 4
    assert isinstance(exchange.pull(pull(1)), AnswerDecline)


def test_what_the_model_has_already_is_not_written_again():
    exchange = make_exchange()
    exchange.offer(update(1, 1, 7.0))
    exchange.offer(update(1, 1, 7.0))
    assert [item.fragment for item in exchange.take_updates()] == [1]
    exchange.offer(update(1, 1, 7.0))
    assert exchange.take_updates() == []


def test_an_update_that_changes_nothing_still_moves_the_version():
    """The base of the next outer gradient is named by term and t, not by its bits alone."""
    exchange = make_exchange()
    first = update(1, 1, 7.0)
    again = replace(first, version=replace(first.version, global_step=2))
    exchange.offer(first)
    assert exchange.take_updates() == [first]
    exchange.offer(again)
    assert exchange.take_updates() == [again]


def test_a_failure_reaches_whoever_waits_for_the_first_parameters():
    exchange = Exchange("learner-0")
    exchange.failed(DilocoError(Reason.NO_SHARD_LEFT, "full"))
    with pytest.raises(DilocoError, match="full"):
        exchange.synced.result(0)
    ended = Exchange("learner-1")
    ended.ended()
    with pytest.raises(DilocoError, match="ended before the parameters came"):
        ended.synced.result(0)
