"""Containers: who is who, what is refused with which words, what is undone despite errors."""

from __future__ import annotations

import signal
import subprocess
from typing import Any, cast

import pytest
from docker.errors import DockerException

from decoupled_diloco.errors import EXIT_USAGE, DilocoError, Reason, UsageError
from diloco_fleet.chaos.conductor import Begin
from diloco_fleet.chaos.docker_fleet import ComposedFleet
from diloco_fleet.chaos.docker_host import Host
from diloco_fleet.chaos.docker_injector import DockerInjector, open_engine, with_names
from diloco_fleet.chaos.injector import refuse_impossible
from diloco_fleet.chaos.sample import LearnerSeen, Sample
from diloco_fleet.chaos.scenario import Fault, FaultKind
from diloco_fleet.chaos.scenario_file import SHIPPED, load_scenario
from tests.fleet.fake_engine import ANYONE, LATE, PROJECT, SLOW, FakeEngine, FakeHost, strike

AT: dict[str, Any] = {"at_s": (1.0,)}
CUT = Fault(
    fault=FaultKind.PARTITION, between=("learner-2, synchronizer-1", "rest"), duration_s=5.0, **AT
)
KILL = Fault(fault=FaultKind.KILL, who="random learner", **AT)
FREEZE = Fault(fault=FaultKind.FREEZE, **ANYONE)
NO_REDIS = Fault(fault=FaultKind.REDIS_LOSS, duration_s=5.0, **AT)
GROUPS = (("learner-2", "synchronizer-1"), ("learner-0", "learner-1", "synchronizer-0", "redis"))


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


def test_a_command_that_fails_in_a_container_is_an_error(
    engine: FakeEngine, injector: DockerInjector
) -> None:
    engine.by_service("redis").exit_code = 1
    empty = Fault(fault=FaultKind.REDIS_EMPTY, **AT)
    with pytest.raises(DilocoError, match="redis-cli in redis: what it said"):
        strike(injector, empty, "redis")


# -- containers that come and go ------------------------------------------------------------------


def test_a_container_that_is_made_anew_keeps_its_name(
    engine: FakeEngine, host: FakeHost, injector: DockerInjector
) -> None:
    """Its restarts do not count backwards, and its id in the run is asked for again."""
    engine.by_service("learner-b").attrs["RestartCount"] = 2
    fleet = ComposedFleet(cast("Any", engine), PROJECT)
    assert fleet.learner_ids()["cedar"] == "learner-2"
    anew = engine.make_anew("learner-b")
    anew.files = {"/self/learner-id": "dogwood\n"}
    anew.attrs["RestartCount"] = 1
    fleet.refresh()
    assert fleet.container("learner-2") is anew
    assert fleet.restarts()["learner-2"] == 3
    assert fleet.learner_ids() == {
        "amber": "learner-0", "birch": "learner-1", "dogwood": "learner-2"
    }  # fmt: skip
    strike(injector, KILL, "learner-2")
    assert [name for name, _ in host.signals] == [anew.id]


def test_a_container_that_is_gone_stops_no_look(
    engine: FakeEngine, injector: DockerInjector
) -> None:
    fleet = ComposedFleet(cast("Any", engine), PROJECT)
    engine.all.remove(engine.by_service("learner-b"))
    fleet.refresh()
    assert "learner-2" in fleet.names()
    assert "learner-2" not in fleet.running()
    assert fleet.restarts()["learner-2"] == 0
    with pytest.raises(DilocoError, match="the container of learner-2 is gone") as caught:
        strike(injector, KILL, "learner-2")
    assert caught.value.reason is Reason.TARGET_NOT_FOUND


def test_of_two_with_one_name_the_newer_counts(engine: FakeEngine) -> None:
    """Compose makes the new one before it takes the old one away."""
    old = engine.by_service("learner-b")
    anew = engine.make_anew("learner-b")
    engine.all.append(old)
    assert ComposedFleet(cast("Any", engine), PROJECT).container("learner-2") is anew


def test_what_is_begun_is_healed_though_containers_were_made_anew(
    engine: FakeEngine, host: FakeHost, injector: DockerInjector
) -> None:
    strike(injector, FREEZE, "learner-0", 0)
    strike(injector, SLOW, "learner-1", 1)
    strike(injector, NO_REDIS, "redis", 2)
    injector.begin(Begin(number=3, fault=CUT, groups=GROUPS))
    for service in ("learner", "learner-b", "redis", "standby"):
        engine.make_anew(service)
    redis = engine.by_service("redis")
    redis.status = "created"
    host.shaped.clear()  # with the links of the one that was made anew
    networks = engine.by_service("learner-b").networks
    networks.clear()
    networks["dc-b"] = {"Aliases": ["learner-b"]}
    engine.by_service("standby").networks.clear()
    assert injector.heal_all() == []
    assert redis.status == "running"
    assert not engine.made
    assert set(networks) == {"dc-b"}


def test_a_partition_does_not_miss_who_is_gone(
    engine: FakeEngine, injector: DockerInjector
) -> None:
    engine.all.remove(engine.by_service("redis"))
    injector.begin(Begin(number=0, fault=CUT, groups=GROUPS))
    assert set(engine.by_service("learner-b").networks) == {f"{PROJECT}-chaos-0"}
    assert injector.heal_all() == []


def test_a_container_for_one_command_is_nobody(engine: FakeEngine) -> None:
    """`docker compose run learner` leaves one, with the labels of its service."""
    once = engine.make_anew("learner-b")
    once.labels = {**once.labels, "com.docker.compose.oneoff": "True"}
    assert "learner-2" not in ComposedFleet(cast("Any", engine), PROJECT).names()


def test_addresses_that_were_fixed_are_so_again(
    engine: FakeEngine, injector: DockerInjector
) -> None:
    networks = engine.by_service("learner-b").networks
    fixed = {"IPv4Address": "10.1.0.5", "IPv6Address": "fd00::5"}
    networks["dc-b"]["IPAMConfig"] = fixed
    injector.begin(Begin(number=0, fault=CUT, groups=(("learner-2",), GROUPS[1])))
    assert not networks
    injector.heal(0)
    assert networks["dc-b"]["IPAMConfig"] == fixed


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
    ("host_ip", "address"),
    [("127.0.0.1", "127.0.0.1:5000"), ("0.0.0.0", "127.0.0.1:5000"), ("::", "[::1]:5000")],
)
def test_a_synchronizer_is_watched_at_its_own_port_and_not_at_that_of_its_page(
    engine: FakeEngine, host_ip: str, address: str
) -> None:
    attrs = engine.by_service("synchronizer").attrs
    attrs["Config"]["Env"].append("DILOCO_ADDRESS=0.0.0.0:9000")
    attrs["NetworkSettings"]["Ports"] = {
        "8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": "8080"}],
        "9000/tcp": [{"HostIp": host_ip, "HostPort": "5000"}],
    }
    assert ComposedFleet(cast("Any", engine), PROJECT).addresses()["synchronizer-0"] == address


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
    filled, other = engine.by_service("synchronizer"), engine.by_service("standby")
    filled.output = b"dd: error writing '/store/.filler': No space left on device"
    strike(injector, full, "synchronizer-0", 0)
    injector.heal(0)
    assert [x[0] for x in filled.executed] == ["dd", "sh", "rm"], "and it is kept full meanwhile"
    with pytest.raises(DilocoError, match="dd in synchronizer-1: what it said"):
        strike(injector, full, "synchronizer-1", 1)
    other.kill()
    injector.heal(1)
    assert [x[0] for x in other.executed] == ["dd"], "its disk went with it"


def test_what_the_host_lacks_is_the_reason(host: FakeHost, injector: DockerInjector) -> None:
    host.why_not = "NET_ADMIN is missing"
    for fault in (SLOW, KILL):
        assert injector.refusal(fault) == "NET_ADMIN is missing"


def test_containers_of_another_machine_are_not_struck_by_their_pids_here(
    host: FakeHost, injector: DockerInjector
) -> None:
    host.elsewhere = True
    for fault in (SLOW, LATE, KILL):
        assert "another machine" in injector.refusal(fault)


@pytest.mark.parametrize(
    ("service", "who", "words"),
    [
        ("learner-b", "random learner", "learner-2 has no restart policy"),
        ("learner-b", "learner-2", "learner-2 has no restart policy"),
        ("learner-b", "learner-1", ""),
        ("standby", "the leader", "synchronizer-1 has no restart policy"),
        ("standby", "random learner", ""),
        ("redis", "redis", "redis has no restart policy"),
    ],
)
def test_who_would_stay_down_is_not_killed(
    engine: FakeEngine, injector: DockerInjector, service: str, who: str, words: str
) -> None:
    engine.by_service(service).attrs["HostConfig"]["RestartPolicy"] = {"Name": "no"}
    why = injector.refusal(Fault(fault=FaultKind.KILL, who=who, **AT))
    assert words in why
    assert bool(words) == bool(why)


def test_a_signal_reaches_processes_of_the_container_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pid may be another process's by now, or here that of nobody in it."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            with pytest.raises(DilocoError, match="none of the container's") as caught:
                Host().signal(process.pid, "0123456789ab", signal.SIGKILL)
            assert caught.value.reason is Reason.TARGET_NOT_FOUND
            assert process.poll() is None
            monkeypatch.setattr(Host, "owns", lambda *_: True)
            Host().signal(process.pid, "0123456789ab", signal.SIGTERM)
            assert process.wait() == -signal.SIGTERM
            with pytest.raises(DilocoError, match="none of the container's"):
                Host().signal(process.pid, "0123456789ab", signal.SIGTERM)
        finally:
            process.kill()
