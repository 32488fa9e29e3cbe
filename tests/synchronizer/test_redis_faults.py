"""A Redis that is killed, restarted empty, frozen or slow: every call ends, and the next works."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.versions import Incarnation
from synchronizer_server.membership import RedisClient
from tests.synchronizer.keepers import CALLS, Process, process_at, prolong, take, until
from tests.synchronizer.redis_server import RedisServer, free_port, running_redis

pytestmark = pytest.mark.redis
SHORT_S = 1.0


class SlowLine:
    """A line to a Redis that holds back what Redis answers while it is not ``open``."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()
        self.open = asyncio.Event()
        self.open.set()
        self.address = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[SlowLine]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            try:
                yield self
            finally:
                self.open.set()
                await asyncio.gather(*self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        host, port = self._target.split(":")
        redis_reader, redis_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(
            self._copy(reader, redis_writer, slow=False),
            self._copy(redis_reader, writer, slow=True),
        )

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if slow:
                    await self.open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def every_call_fails(process: Process) -> None:
    """All calls at once, each of which ends with one reason."""
    async with asyncio.timeout(60):
        results = await asyncio.gather(
            *(call(process) for call in CALLS.values()), return_exceptions=True
        )
    for name, result in zip(CALLS, results, strict=True):
        assert isinstance(result, DilocoError), f"{name}: {result!r}"
        assert result.reason is Reason.MEMBERSHIP_UNAVAILABLE, name


async def every_call_works(process: Process) -> None:
    for call in CALLS.values():
        await call(process)


@pytest.mark.asyncio
async def test_a_redis_that_was_killed_is_used_again_once_it_is_back(tmp_path: Path) -> None:
    port = free_port()
    async with process_at(f"127.0.0.1:{port}", timeout_s=5.0) as process:
        with running_redis(tmp_path, port=port) as server:
            await every_call_works(process)
            server.process.kill()
            server.process.wait()
            await every_call_fails(process)
        with running_redis(tmp_path, port=port):
            assert (await process.lease.read()).in_sync is None
            await every_call_works(process)


@pytest.mark.asyncio
async def test_who_asks_redis_knows_whether_it_answers(tmp_path: Path) -> None:
    client = RedisClient(f"127.0.0.1:{(port := free_port())}", "run", timeout_s=5.0)
    assert client.trouble is None, "nobody has asked yet"
    for _ in range(2):
        with running_redis(tmp_path, port=port):
            await client.get("quorum")
            assert client.trouble == ""
        with pytest.raises(DilocoError):
            await client.get("quorum")
        assert client.trouble
    await client.aclose()


@pytest.mark.asyncio
async def test_a_redis_that_is_killed_with_calls_under_way_ends_them(tmp_path: Path) -> None:
    async with process_at(f"127.0.0.1:{(port := free_port())}", timeout_s=30.0) as process:
        with running_redis(tmp_path, port=port) as server:
            await every_call_works(process)
            server.freeze()
            calls = asyncio.ensure_future(every_call_fails(process))
            await asyncio.sleep(0)
            server.process.kill()
            await calls
            server.process.wait()


@pytest.mark.asyncio
async def test_a_connection_that_uvloop_finds_broken_is_a_redis_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its RuntimeError is no fault of ours: it must not end a leader; any other one is."""
    client = RedisClient("127.0.0.1:1", "run")
    why = "unable to perform operation on <TCPTransport closed=True>; the handler is closed"

    async def broken(_: str) -> None:
        raise RuntimeError(why)

    monkeypatch.setattr(client._redis, "get", broken)
    with pytest.raises(DilocoError, match="its connection broke") as caught:
        await client.get("term")
    assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE
    why = "something else"
    with pytest.raises(RuntimeError, match="something else"):
        await client.get("term")
    await client.aclose()


@pytest.mark.asyncio
async def test_a_frozen_redis_hangs_no_call_and_serves_again_after(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        async with process_at(server.address, timeout_s=SHORT_S) as process:
            await every_call_works(process)
            server.freeze()
            await every_call_fails(process)
            await every_call_fails(process)
            server.thaw()
            await every_call_works(process)


@pytest.mark.asyncio
async def test_an_answer_that_comes_too_late_is_not_taken_for_that_of_the_next_call(
    tmp_path: Path,
) -> None:
    with running_redis(tmp_path) as server:
        async with (
            SlowLine(server.address).running() as line,
            process_at(line.address, timeout_s=SHORT_S) as process,
        ):
            await every_call_works(process)
            line.open.clear()
            await every_call_fails(process)
            line.open.set()
            for _ in range(5):
                assert (await process.membership.read_back()).quorum == 2
                assert (await process.lease.read()).term == 1
                assert await process.membership.is_seeded()
            await every_call_works(process)


@pytest.mark.asyncio
async def test_what_was_asked_of_a_slow_redis_may_be_done_and_asking_again_is_safe(
    tmp_path: Path,
) -> None:
    with running_redis(tmp_path) as server:
        async with (
            SlowLine(server.address).running() as line,
            process_at(server.address, "elsewhere") as elsewhere,
            process_at(line.address, "slow", timeout_s=SHORT_S) as slow,
            process_at(server.address, "slow") as other,
        ):
            await take(elsewhere.lease, elsewhere.claim())  # Redis knows the script now
            await slow.lease.read()  # and this one has a connection
            claim = slow.claim(1)
            line.open.clear()
            with pytest.raises(DilocoError) as caught:
                await take(slow.lease, claim)
            assert caught.value.reason is Reason.MEMBERSHIP_UNAVAILABLE
            assert (await other.lease.read()).holder == claim
            line.open.set()
            assert (await take(slow.lease, claim)).holder == claim
            assert (await take(other.lease, other.claim(2, "b"))).holder == claim


@pytest.mark.asyncio
async def test_a_redis_that_restarts_empty_is_told_everything_again(tmp_path: Path) -> None:
    port = free_port()
    async with process_at(f"127.0.0.1:{port}", timeout_s=10.0) as process:
        claim, batch = process.claim(4), {"a": Incarnation(2, 5), "b": Incarnation(4, 1)}
        with running_redis(tmp_path, port=port):
            await take(process.lease, claim)
            await process.membership.heartbeat(batch, 4)
        with running_redis(tmp_path, port=port):
            assert await process.membership.members() == []
            await process.membership.heartbeat(batch, 4)
            view = await prolong(process.lease, claim, in_sync=("s",))
            assert (view.holder, view.term, view.in_sync) == (claim, 4, {"s"})
            roll = await process.membership.read_back()
            assert {x.learner_id: x.incarnation for x in roll.members} == batch
            granted = await process.membership.grant_incarnation("a", Incarnation(4, 6))
            assert granted == Incarnation(4, 6)
            with pytest.raises(DilocoError) as caught:
                await process.membership.heartbeat(batch, 3)
            assert caught.value.reason is Reason.STALE_TERM


HOLDER = """
import asyncio
from synchronizer_server.membership.redis_client import RedisClient
from tests.synchronizer.keepers import process_at, prolong, take

async def main():
    async with process_at({address!r}, "frozen") as process:
        claim = process.claim(1, "old")
        await take(process.lease, claim, timeout_s=1.0)
        await process.lease.set_in_sync(claim, ["new"], revision=1)
        print("held", flush=True)
        while True:
            view = await prolong(process.lease, claim, timeout_s=1.0)
            if view.holder != claim:
                break
        print("lost to", view.holder.leader_id, "term", view.term, flush=True)
        print("in sync", await process.lease.set_in_sync(claim, ["old"], revision=1), flush=True)

asyncio.run(main())
"""


@contextlib.contextmanager
def holding(server: RedisServer) -> Iterator[subprocess.Popen[str]]:
    """A process that takes the lease of the run "frozen" and renews it all the time."""
    script = HOLDER.format(address=server.address)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.asyncio
async def test_a_holder_frozen_past_its_lease_cannot_renew_once_another_has_taken_it(
    tmp_path: Path,
) -> None:
    with running_redis(tmp_path) as server, holding(server) as holder:
        assert holder.stdout is not None
        line = await asyncio.to_thread(holder.stdout.readline)
        assert line == "held\n"
        async with process_at(server.address, "frozen") as process:
            claim = process.claim(2, "new")
            assert (await take(process.lease, claim)).holder == process.claim(1, "old")
            holder.send_signal(signal.SIGSTOP)

            async def has_followed() -> bool:
                return (await take(process.lease, claim)).holder == claim

            await until(has_followed)
            holder.send_signal(signal.SIGCONT)
            rest = await asyncio.to_thread(holder.stdout.read)
            assert rest == "lost to new term 2\nin sync False\n"
            view = await process.lease.read()
            assert (view.holder, view.term, view.in_sync) == (claim, 2, {claim.leader_id})
