"""What ``diloco run --standby`` starts, and the secrets that it writes."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path

import pytest
from test_plan import parsed, settled

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.fault_points import VARIABLE, Fault, FaultAction, FaultPoint, Faults
from decoupled_diloco.settings import RunSettings
from diloco_fleet.plan import Plan, make_plan
from diloco_fleet.run_files import RunFiles
from diloco_fleet.standby import write_standby
from synchronizer_server.cli import cli as synchronizer_cli
from synchronizer_server.settings import ServerSettings

PATH = {"PATH": os.environ["PATH"]}


def with_program(folder: Path) -> dict[str, str]:
    """An environment whose PATH holds something called redis-server."""
    program = folder / "bin" / "redis-server"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return {"PATH": str(program.parent)}


def planned(folder: Path, environ: dict[str, str], **flags: object) -> tuple[Plan, RunFiles]:
    files = RunFiles(folder / "run")
    files.root.mkdir(exist_ok=True)
    return make_plan(settled(standby=True, **flags), files, environ), files


def servers(plan: Plan) -> list[ServerSettings]:
    module = "synchronizer_server.cli"
    return [parsed(synchronizer_cli, spec, module, ServerSettings) for spec in plan.synchronizers]


def test_two_synchronizers_know_of_one_another_and_share_key_and_redis(tmp_path: Path) -> None:
    plan, files = planned(tmp_path, with_program(tmp_path), replication="one-or-degrade")
    assert [spec.name for spec in plan.synchronizers] == ["synchronizer-0", "synchronizer-1"]
    first, second = servers(plan)
    assert (first.address, second.address) == plan.addresses
    assert (first.peers, second.peers) == (second.address, first.address)
    assert (first.advertise, second.advertise) == plan.addresses
    assert first.key_file == second.key_file == files.key
    assert (first.store, second.store) == (files.store, files.store_of(1))
    assert first.journal == files.metrics_of("synchronizer-0")
    assert plan.redis is not None
    assert first.redis == second.redis == plan.redis.url
    assert plan.pages == tuple(f"http://{x.http_address}/" for x in (first, second))
    ports = {*plan.addresses, first.http_address, second.http_address}
    ports.add(plan.redis.url.rpartition("@")[2])
    assert len(ports) == 5, "no two listen on the same port"
    module = "synchronizer_server.cli"
    without_secrets = dataclasses.replace(plan.synchronizers[0], environment={})
    run = parsed(synchronizer_cli, without_secrets, module, RunSettings)
    assert run.replication == "one-or-degrade"
    for spec in (*plan.learners, plan.evaluator):
        assert ",".join(plan.addresses) in spec.command, "they are given both addresses"
        assert not any("REDIS" in name for name in spec.environment), "and no way to Redis"
    assert plan.synchronizer_at(second.address) == "synchronizer-1"
    assert plan.synchronizer_at(None) is None


def test_key_and_password_are_for_this_user_alone_and_in_no_command(tmp_path: Path) -> None:
    plan, files = planned(tmp_path, with_program(tmp_path))
    assert plan.redis is not None
    assert plan.redis.process is not None
    write_standby(files, plan.redis)
    key = files.key.read_text()
    assert len(bytes.fromhex(key.strip())) == 32
    for path in (files.key, files.redis_config):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    password = plan.redis.url.partition("@")[0].rpartition(":")[2]
    assert f"requirepass {password}" in files.redis_config.read_text()
    for spec in (*plan.synchronizers, plan.redis.process):
        assert not any(password in word or key.strip() in word for word in spec.command)
    again, _ = planned(tmp_path, {"PATH": str(tmp_path / "bin")})
    assert again.redis is not None
    write_standby(files, again.redis)
    assert files.key.read_text() == key, "a resumed run keeps its key"
    assert stat.S_IMODE(files.redis_config.stat().st_mode) == 0o600


def test_without_a_redis_and_a_redis_server_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"install Redis, or give --redis") as caught:
        planned(tmp_path, {"PATH": str(tmp_path)})
    assert caught.value.reason is Reason.CONFIG_INVALID


def test_a_redis_that_is_given_is_used_and_none_is_started(tmp_path: Path) -> None:
    plan, files = planned(tmp_path, {"PATH": ""}, redis="redis://:pw@elsewhere:1")
    assert plan.redis is not None
    assert plan.redis.process is None
    assert {entry.redis for entry in servers(plan)} == {"redis://:pw@elsewhere:1"}
    write_standby(files, plan.redis)
    assert not files.redis.exists()


def test_a_run_that_had_a_standby_is_not_resumed_without(tmp_path: Path) -> None:
    """The second store may hold the newest rounds."""
    files = RunFiles(tmp_path)
    files.store_of(1).mkdir()
    with pytest.raises(UsageError, match="--standby") as caught:
        make_plan(settled(), files, PATH)
    assert caught.value.reason is Reason.CONFIG_CONFLICT


def test_faults_reach_every_process_under_its_own_name(tmp_path: Path) -> None:
    fault = Fault(name="f", point=FaultPoint.MID_PUSH, action=FaultAction.KILL)
    text = Faults(log=tmp_path / "log", faults=[fault]).to_text()
    plan, _ = planned(tmp_path, {**with_program(tmp_path), VARIABLE: text, "DILOCO_PACE": "1"})
    for spec in (*plan.synchronizers, *plan.learners, plan.evaluator):
        assert Faults.parse(spec.environment[VARIABLE]) == dataclasses.replace(
            Faults.parse(text), process=spec.name
        )
        assert json.loads(spec.environment[VARIABLE])["process"] == spec.name
    quiet, _ = planned(tmp_path, {"PATH": str(tmp_path / "bin")})
    assert not any(VARIABLE in spec.environment for spec in quiet.synchronizers)
