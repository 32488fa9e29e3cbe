"""Several synchronizers over real gRPC: a leader that dies, freezes or hands over."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
import torch
from scripted_synchronizer import until
from served_synchronizer import Served, served
from torch import nn

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.layout import Strategy, build_layout
from decoupled_diloco.v1 import admin_pb2, synchronizer_pb2
from learner_client import Learner, State, wait_for_settings
from learner_client.addresses import MAX_ADDRESSES, read_addresses, usable_addresses
from learner_client.dialling import search_for
from learner_client.observer import Observer
from learner_client.parameters import ModuleParameters
from learner_client.settings import EvaluatorSettings, LearnerSettings
from learner_client.transport import GrpcTransport

NAME = "learner-0"


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def follow(running: Served, term: int = 1) -> None:
    error = DilocoError(Reason.NOT_LEADING, "it follows", term=term)
    rpcs = ("GetRun", "Join", "Report", "Push", "Watch")
    running.service.refuses = dict.fromkeys(rpcs, error)


def take_over(running: Served, before: Served, term: int) -> None:
    def act() -> None:
        service = running.service
        service.layout, service.published = before.service.layout, dict(before.service.published)
        service.term, service.refuses = term, {}

    running.do(act)


@contextlib.contextmanager
def two_served(**settings):
    with served(**settings) as first, served(**settings) as second:
        follow(second)
        yield first, second


def test_a_learner_moves_over_the_network_and_its_steps_never_wait():
    moves = []
    with two_served(heartbeat_interval_s=0.05) as (first, second):
        learner = Learner(
            make_model(),
            address=f"{first.address},{second.address}",
            learner_id=NAME,
            on_move=moves.append,
        )
        with learner:
            assert learner.status.address == first.address
            learner.step(num_tokens=1)
            first.wait(lambda: first.service.steps)
            first.away()
            first.wait(lambda: not learner.status.online)
            inside_s = 0.0
            for _ in range(100):
                began = time.perf_counter()
                learner.step(num_tokens=1)
                inside_s += time.perf_counter() - began
            assert inside_s < 2.0, "100 steps with nobody there"
            take_over(second, first, term=2)
            second.wait(lambda: sum(s.num_steps for s in second.service.steps) == 100)
            second.wait(lambda: learner.status.online)
            assert (learner.status.address, learner.status.term) == (second.address, 2)
            assert learner.status.state is State.TRAINING
        assert [leave.reason for leave in second.service.leaves] == ["done"]
    assert [(m.left, m.address, m.term) for m in moves] == [(first.address, second.address, 2)]


def test_a_push_under_way_to_a_leader_that_is_left_costs_nothing():
    """Its call ends with the connection; what was pushed is asked for again by the new leader."""
    model = make_model()
    with contextlib.ExitStack() as stack:
        first, second = stack.enter_context(two_served())
        addresses = [first.address, second.address]
        learner = stack.enter_context(Learner(model, address=addresses, learner_id=NAME))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.125)
        learner.step(num_tokens=4)
        first.service.hold_pushes = True
        first.wait(lambda: NAME in first.service._down)
        first.do(lambda: first.service.pull(NAME, 1, 1))
        first.wait(lambda: first.service.push_offsets)
        take_over(second, first, term=2)
        told = synchronizer_pb2.NotLeading()
        first.do(lambda: first.service.say(NAME, not_leading=told))
        second.wait(lambda: NAME in second.service._down)
        assert learner.status.address == second.address
        second.do(lambda: second.service.pull(NAME, 2, 1))
        second.wait(lambda: second.service.pushes)
        assert second.service.pushes[0].header.num_steps == 1


@pytest.mark.asyncio
async def test_calls_under_way_end_as_unavailable_where_a_connection_is_left():
    with served() as running:
        running.service.is_frozen = True
        transport = GrpcTransport(running.address)
        call = asyncio.create_task(transport.get_run(admin_pb2.GetRunRequest()))
        await until(lambda: running.service.asked)
        await transport.aclose()
        with pytest.raises(DilocoError, match="UNAVAILABLE"):
            await call


def test_settings_come_from_the_leader_wherever_it_stands():
    with two_served() as (first, second):
        follow(first)
        second.service.refuses = {}
        second.service.settings = type(second.service.settings)(run_id="led", num_fragments=3)
        addresses = ["127.0.0.1:1", first.address, second.address]
        assert wait_for_settings(addresses, timeout_s=20).run_id == "led"


def test_with_several_addresses_and_nobody_there_it_says_which_were_asked():
    with pytest.raises(DilocoError, match=r"127.0.0.1:1 UNAVAILABLE, 127.0.0.1:2 UNAVAILABLE"):
        wait_for_settings("127.0.0.1:1,127.0.0.1:2", timeout_s=0.5)


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["dies", "stalls"])
async def test_an_observer_moves_as_learners_do(how):
    model = make_model()
    layout = build_layout(
        ModuleParameters(model).tensors, strategy=Strategy.BALANCED, num_fragments=3, overlap=1
    )
    with two_served(lease_timeout_s=0.2) as (first, second):
        service = first.service
        service.layout = layout
        for fragment in layout.fragments:
            service.seed(fragment.index, torch.zeros(fragment.num_elements))
        search = search_for([first.address, second.address], name="observer")
        copies = aiter(Observer(search, layout, service.settings).follow())
        assert {v.term for v in (await anext(copies)).versions} == {1}
        second.service.term = 2
        take_over(second, first, term=2)
        for fragment in layout.fragments:
            second.service.seed(fragment.index, torch.ones(fragment.num_elements))
        if how == "dies":
            first.away()
        published = await anext(copies)
        assert {v.term for v in published.versions} == {2}
        assert all(bool((vector == 1).all()) for vector in published.vectors)
        assert search.leadership.current == second.address
        await copies.aclose()
        await search.transport.aclose()


# -- addresses in settings -------------------------------------------------------------------


@pytest.mark.parametrize("settings", [LearnerSettings, EvaluatorSettings])
def test_settings_take_several_addresses_and_refuse_each_that_is_wrong(settings):
    assert settings(address="a:1, b:2,[::1]:3").address == "a:1, b:2,[::1]:3"
    for wrong in ("a:1,b", "a:1,,b:2", ",", "a:1;b:2", "a:1,b:99999"):
        with pytest.raises(UsageError, match="address is") as caught:
            settings(address=wrong)
        assert caught.value.reason is Reason.CONFIG_INVALID


def test_addresses_are_read_in_order_and_once_each():
    assert read_addresses(" a:1,b:2 ,a:1") == ("a:1", "b:2")
    assert read_addresses(["[::1]:5", "b:2"]) == ("[::1]:5", "b:2")
    many = ",".join(f"h:{n + 1}" for n in range(MAX_ADDRESSES + 1))
    with pytest.raises(UsageError, match=f"names {MAX_ADDRESSES + 1} synchronizers"):
        read_addresses(many)


def test_a_learner_refuses_bad_addresses_at_once():
    for wrong in ("nonsense", ["127.0.0.1:1", ""], "127.0.0.1:1,example.org:1", []):
        with pytest.raises(UsageError):
            Learner(make_model(), address=wrong, learner_id=NAME)


def test_addresses_named_by_others_are_used_only_where_they_could_be_given_by_the_user():
    named = ["127.0.0.1:5", "nonsense", "10.0.0.1:5", "127.0.0.1:0", "x" * 999 + ":1", "[::1]:7"]
    assert usable_addresses(named, insecure=False) == ("127.0.0.1:5", "[::1]:7")
    assert usable_addresses(named, insecure=True) == ("127.0.0.1:5", "10.0.0.1:5", "[::1]:7")
    assert len(usable_addresses((f"h:{n + 1}" for n in range(10_000)), insecure=True)) <= 64
