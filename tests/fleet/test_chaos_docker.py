"""Containers: who is who, what is refused with which words, what is undone despite errors."""

from __future__ import annotations

from typing import Any, cast

import pytest
from docker.errors import DockerException

from decoupled_diloco.errors import EXIT_USAGE, DilocoError, Reason, UsageError
from diloco_fleet.chaos import docker_host
from diloco_fleet.chaos.conductor import Begin
from diloco_fleet.chaos.docker_fleet import ComposedFleet
from diloco_fleet.chaos.docker_host import Host, latency, loss, rate_limit
from diloco_fleet.chaos.docker_injector import DockerInjector, open_engine, with_names
from diloco_fleet.chaos.injector import refuse_impossible
from diloco_fleet.chaos.sample import LearnerSeen, Sample
from diloco_fleet.chaos.scenario import Fault, FaultKind
from diloco_fleet.chaos.scenario_file import SHIPPED, load_scenario
from tests.fleet.fake_engine import PROJECT, FakeEngine, FakeHost

AT: dict[str, Any] = {"at_s": (1.0,)}
CUT = Fault(
    fault=FaultKind.PARTITION, between=("learner-2, synchronizer-1", "rest"), duration_s=5.0, **AT
)
GROUPS = (("learner-2", "synchronizer-1"), ("learner-0", "learner-1", "synchronizer-0", "redis"))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def host(engine: FakeEngine) -> FakeHost:
    return FakeHost(engine)


@pytest.fixture
def injector(engine: FakeEngine, host: FakeHost) -> DockerInjector:
    return DockerInjector(cast("Any", engine), PROJECT, host)


def test_containers_have_the_names_that_scenarios_use(engine: FakeEngine) -> None:
    """In the order of service and number, whatever id a learner has; tools are none."""
    fleet = ComposedFleet(cast("Any", engine), PROJECT)
    assert {name: fleet.container(name).id for name in fleet.names()} == {
        "learner-0": "learner-1", "learner-1": "learner-2", "learner-2": "learner-b-1",
        "synchronizer-0": "synchronizer-1", "synchronizer-1": "standby-2", "redis": "redis-1",
    }  # fmt: skip
    assert fleet.learner_ids() == {
        "amber": "learner-0", "birch": "learner-1", "cedar": "learner-2"
    }  # fmt: skip
    assert fleet.addresses() == {
        "synchronizer-0": "127.0.0.1:50001", "synchronizer-1": "127.0.0.1:50002"
    }  # fmt: skip


def test_what_learners_wrote_is_read_from_their_volume_under_their_names(
    injector: DockerInjector,
) -> None:
    assert set(injector.metrics().marks) == {"learner-0", "learner-1", "learner-2"}


def test_a_sample_speaks_of_containers() -> None:
    seen = LearnerSeen(state="live", incarnation=(1, 1), local_step=3, accepted=2, silent_s=0.0)
    sample = Sample(at_s=1.0, running=frozenset(), learners={"amber": seen, "stranger": seen})
    assert with_names(sample, {"amber": "learner-0"}).learners == {"learner-0": seen}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_scenario_can_be_done(name: str, injector: DockerInjector) -> None:
    refuse_impossible(injector, load_scenario(name))


def test_a_fleet_whose_learners_have_ended_is_noticed(
    engine: FakeEngine, injector: DockerInjector
) -> None:
    with injector:
        assert injector.look().ended == ""
    for container in engine.all:
        if "learner" in container.id:
            container.kill()
    with DockerInjector(cast("Any", engine), PROJECT, FakeHost(engine)) as again:
        assert "no learner runs" in again.look().ended


def test_a_datacenter_that_is_cut_off_still_hears_itself(
    engine: FakeEngine, injector: DockerInjector
) -> None:
    """Its members leave what they share with others, and meet under the same names."""
    injector.begin(Begin(number=3, fault=CUT, groups=GROUPS))
    standby, learner = engine.by_service("standby"), engine.by_service("learner-b")
    [network] = engine.made
    assert network.name == f"{PROJECT}-chaos-3"
    assert set(standby.networks) == {network.name}
    assert network.name in learner.networks
    assert "standby" in standby.networks[str(network.name)]["Aliases"]
    others = {name for x in engine.all if x not in (standby, learner) for name in x.networks}
    assert not others & set(standby.networks)
    assert not others & set(learner.networks)
    injector.heal(3)
    assert set(standby.networks) == {"hub", "dc-a", "dc-b"}
    assert standby.networks["dc-a"]["Aliases"] == ["standby"]
    assert set(learner.networks) == {"dc-b"}
    assert not engine.made


def test_what_cannot_be_healed_is_kept_and_tried_again(
    engine: FakeEngine, injector: DockerInjector
) -> None:
    injector.begin(Begin(number=3, fault=CUT, groups=GROUPS))
    engine.network("dc-a").stuck = True
    with pytest.raises(DilocoError, match="the network is stuck"):
        injector.heal(3)
    standby = engine.by_service("standby")
    assert set(standby.networks) == {"hub", "dc-b"}, "everything else is healed"
    assert len(injector.heal_all()) == 1
    engine.network("dc-a").stuck = False
    assert injector.heal_all() == []
    assert set(standby.networks) == {"hub", "dc-a", "dc-b"}


def test_links_of_a_container_that_began_anew_need_no_healing(
    engine: FakeEngine, injector: DockerInjector
) -> None:
    slow = Fault(fault=FaultKind.BANDWIDTH, who="learner-0", mbit_per_s=10.0, duration_s=5.0, **AT)
    injector.begin(Begin(number=0, fault=slow, groups=(("learner-0",),)))
    engine.by_service("learner").start()
    injector.heal(0)
    assert injector.heal_all() == []


def test_a_limit_of_bandwidth_is_put_on_both_ends_and_loss_on_one(
    host: FakeHost, injector: DockerInjector
) -> None:
    slow = Fault(fault=FaultKind.BANDWIDTH, who="learner-0", mbit_per_s=10.0, duration_s=5.0, **AT)
    lossy = Fault(fault=FaultKind.LOSS, who="learner-0", share=0.05, duration_s=5.0, **AT)
    injector.begin(Begin(number=0, fault=slow, groups=(("learner-0",),)))
    assert host.shaped == dict.fromkeys(
        ("eth0", "veth9"), "tbf rate 10000kbit burst 32kb latency 400ms"
    )
    injector.heal(0)
    injector.begin(Begin(number=1, fault=lossy, groups=(("learner-0",),)))
    assert host.shaped == {"eth0": "netem loss 5%"}


def test_a_command_that_fails_in_a_container_is_an_error(
    engine: FakeEngine, injector: DockerInjector
) -> None:
    engine.by_service("redis").exit_code = 1
    empty = Fault(fault=FaultKind.REDIS_EMPTY, **AT)
    with pytest.raises(DilocoError, match="redis-cli in redis: what it said"):
        injector.begin(Begin(number=0, fault=empty, groups=(("redis",),)))


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Error while fetching: PermissionError(13, 'Permission denied')", "no permission"),
        ("Error while fetching: FileNotFoundError(2, 'No such file')", "does not answer; start it"),
    ],
)
def test_an_engine_that_cannot_be_asked_is_named(said: str, words: str) -> None:
    def fail() -> Any:
        raise DockerException(said)

    with pytest.raises(UsageError, match=words) as caught:
        open_engine(fail)
    assert caught.value.reason is Reason.ENGINE_UNAVAILABLE
    assert caught.value.exit_code == EXIT_USAGE


def test_a_project_without_learners_is_refused(engine: FakeEngine) -> None:
    with pytest.raises(UsageError, match="no learner of project other") as caught:
        ComposedFleet(cast("Any", engine), "other")
    assert caught.value.exit_code == EXIT_USAGE


def test_a_synchronizer_whose_port_is_not_published_cannot_be_watched(engine: FakeEngine) -> None:
    engine.by_service("standby").attrs["NetworkSettings"]["Ports"] = {"50051/tcp": None}
    with pytest.raises(UsageError, match="synchronizer-1 publishes no port"):
        ComposedFleet(cast("Any", engine), PROJECT).addresses()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"fault": FaultKind.CLOCK_SKEW, "who": "learner-0", "offset_s": 60.0, **AT}, "process"),
        ({"fault": FaultKind.DISK_FULL, "who": "synchronizer-0", **AT}, "tmpfs"),
        ({"fault": FaultKind.FREEZE, "who": "learner-0", "on": "mid_push"}, "process"),
    ],
)
def test_what_containers_cannot_do_is_refused_with_the_reason(
    injector: DockerInjector, values: dict[str, Any], words: str
) -> None:
    assert words in injector.refusal(Fault(duration_s=5.0, **values))


def test_a_full_disk_is_done_to_a_small_one_alone(
    engine: FakeEngine, injector: DockerInjector
) -> None:
    full = Fault(fault=FaultKind.DISK_FULL, who="synchronizer-0", duration_s=5.0, **AT)
    for service in ("synchronizer", "standby"):
        engine.by_service(service).attrs["HostConfig"]["Tmpfs"] = {"/store": "size=64m"}
    assert injector.refusal(full) == ""
    injector.begin(Begin(number=0, fault=full, groups=(("synchronizer-0",),)))
    injector.heal(0)
    assert [x[0] for x in engine.by_service("synchronizer").executed] == ["dd", "rm"]


def test_what_the_host_lacks_is_the_reason(host: FakeHost, injector: DockerInjector) -> None:
    host.why_not = "NET_ADMIN is missing"
    slow = Fault(fault=FaultKind.BANDWIDTH, who="learner-0", mbit_per_s=1.0, duration_s=5.0, **AT)
    assert injector.refusal(slow) == "NET_ADMIN is missing"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("RTNETLINK answers: Operation not permitted", "NET_ADMIN is missing"),
        ("Error: Specified qdisc kind is unknown.", "the kernel of the host has no netem"),
    ],
)
def test_the_host_says_why_it_cannot_shape(
    monkeypatch: pytest.MonkeyPatch, said: str, words: str
) -> None:
    class Refusing(Host):
        def run(self, *command: str) -> str:
            raise DilocoError(Reason.FAULT_IMPOSSIBLE, f"{command[0]}: {said}")

    monkeypatch.setattr(docker_host.shutil, "which", lambda name: f"/usr/sbin/{name}")
    monkeypatch.setattr(docker_host.os, "geteuid", lambda: 0)
    assert words in Refusing().refusal(*latency(0.1))
    monkeypatch.setattr(docker_host.os, "geteuid", lambda: 1000)
    assert "root" in Refusing().refusal()


def test_disciplines_as_tc_takes_them() -> None:
    assert rate_limit(0.5)[:3] == ["tbf", "rate", "500kbit"]
    assert latency(0.05) == ["netem", "delay", "50ms"]
    assert loss(0.015) == ["netem", "loss", "1.5%"]
