"""Membership in Redis: it outlives the synchronizer, and a standby can read it (design section 6).

Foreign errors are mapped at one border (``_errors``), and nothing that Redis says is believed
before it was checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import redis.asyncio as redis_asyncio
from redis import exceptions as redis_errors
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.versions import Incarnation
from synchronizer_server.membership import scripts
from synchronizer_server.membership.base import Member, check_quorum, stale_grant

_INCARNATION: Final = re.compile(rb"(\d{1,16})\.(\d{1,16})")
_NUMBER: Final = re.compile(rb"\d{1,18}")
_MAX_EXACT: Final = 2**53 - 1  # Lua's numbers are doubles


class RedisMembership:
    """A ``Membership`` in a Redis server (5 or newer).

    A call never takes longer than ``timeout_s``: a Redis that is gone or frozen gives
    ``MEMBERSHIP_UNAVAILABLE``, and the next call tries again.

    Args:
        address: ``redis://[user:password@]host[:port][/db]``, ``rediss://...``, or ``host:port``.
        run_id: the run; it is part of every key.
        group: group of fragments.
        timeout_s: bound on connecting, on an answer, and on a whole call.

    Raises:
        UsageError: ``CONFIG_INVALID`` for an address or run id that cannot be right.
    """

    def __init__(
        self, address: str, run_id: str, *, group: int = 0, timeout_s: float = 2.0
    ) -> None:
        if not run_id or set(run_id) & set("{}"):
            raise UsageError(
                Reason.CONFIG_INVALID, f"run id {run_id!r} must have a character and no brace"
            )
        url, self._where = _parse(address)
        # the braces make a Redis cluster keep all keys of a run on one node, as scripts need
        prefix = f"diloco:{{{run_id}}}:g{group}:"
        self._learners = [prefix + "incarnations", prefix + "heartbeats"]
        self._quorum = prefix + "quorum"
        self._seeded = prefix + "seeded"
        self._timeout_s = timeout_s
        self._client = redis_asyncio.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # a connection that broke while idle is replaced at once; time-outs are not repeated
            retry=Retry(NoBackoff(), 1, supported_errors=(redis_errors.ConnectionError,)),
            decode_responses=False,
        )
        register = self._client.register_script
        self._grant = register(scripts.GRANT)
        self._heartbeat = register(scripts.HEARTBEAT)
        self._members = register(scripts.MEMBERS)
        self._remove = register(scripts.REMOVE)

    async def grant_incarnation(
        self, learner_id: str, *, term: int, at_least: int = 0
    ) -> Incarnation:
        """See ``Membership.grant_incarnation``."""
        async with self._errors():
            answer: Any = await self._grant(keys=self._learners, args=[learner_id, term, at_least])
        if not isinstance(answer, list) or len(answer) != 2:
            raise self._malformed("incarnations", answer)
        incarnation = self._incarnation(answer[1])
        if answer[0] != 1:
            raise stale_grant(learner_id, term, incarnation)
        return incarnation

    async def heartbeat(self, batch: Mapping[str, Incarnation]) -> None:
        """See ``Membership.heartbeat``."""
        if not batch:
            return
        args: list[str | int] = []
        for learner_id, incarnation in batch.items():
            args += [learner_id, incarnation.term, incarnation.number]
        async with self._errors():
            await self._heartbeat(keys=self._learners, args=args)

    async def members(self) -> list[Member]:
        """See ``Membership.members``."""
        return await self._list("")

    async def expired(self, older_than_s: float) -> list[Member]:
        """See ``Membership.expired``."""
        return await self._list(str(round(older_than_s * 1e6)))

    async def remove(self, learner_id: str, incarnation: Incarnation) -> bool:
        """See ``Membership.remove``."""
        async with self._errors():
            answer: Any = await self._remove(
                keys=self._learners, args=[learner_id, str(incarnation)]
            )
        return bool(answer)

    async def get_quorum(self) -> int | None:
        """See ``Membership.get_quorum``."""
        async with self._errors():
            answer: Any = await self._client.get(self._quorum)
        return None if answer is None else self._number("quorum", answer, at_least=1)

    async def set_quorum(self, quorum: int) -> None:
        """See ``Membership.set_quorum``."""
        check_quorum(quorum)
        async with self._errors():
            await self._client.set(self._quorum, quorum)

    async def mark_seeded(self, term: int) -> bool:
        """See ``Membership.mark_seeded``."""
        async with self._errors():
            return bool(await self._client.set(self._seeded, term, nx=True))

    async def is_seeded(self) -> bool:
        """See ``Membership.is_seeded``."""
        async with self._errors():
            answer: Any = await self._client.get(self._seeded)
        return answer is not None and self._number("seeded", answer, at_least=1) > 0

    async def aclose(self) -> None:
        """See ``Membership.aclose``."""
        with contextlib.suppress(redis_errors.RedisError, OSError, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._client.aclose()

    async def _list(self, least_age_us: str) -> list[Member]:
        async with self._errors():
            answer: Any = await self._members(keys=self._learners, args=[least_age_us])
        if not isinstance(answer, list) or len(answer) % 3:
            raise self._malformed("heartbeats", answer)
        result = []
        for index in range(0, len(answer), 3):
            try:
                learner_id = answer[index].decode()
            except (AttributeError, UnicodeDecodeError):
                raise self._malformed("heartbeats", answer[index]) from None
            incarnation = self._incarnation(answer[index + 1])
            age_s = self._number("heartbeats", answer[index + 2]) / 1e6
            result.append(Member(learner_id=learner_id, incarnation=incarnation, age_s=age_s))
        return result

    @contextlib.asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """The border: everything that redis-py may raise becomes one of two reasons."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except redis_errors.ResponseError as error:
            text = str(error)
            if "WRONGTYPE" in text or "MALFORMED" in text:
                raise self._malformed("value", text) from error
            raise self._unavailable(text) from error
        except TimeoutError as error:
            raise self._unavailable(f"no answer within {self._timeout_s} s") from error
        except (redis_errors.RedisError, OSError) as error:
            raise self._unavailable(str(error)) from error

    def _unavailable(self, why: str) -> DilocoError:
        return DilocoError(
            Reason.MEMBERSHIP_UNAVAILABLE,
            f"Redis at {self._where} cannot be used ({why}); check that it runs, that this "
            "address is right and that the password fits",
            address=self._where,
        )

    def _malformed(self, key: str, value: object) -> DilocoError:
        return DilocoError(
            Reason.MALFORMED,
            f"Redis at {self._where} holds a {key} that is not ours ({str(value)[:100]}); remove "
            f"the keys of {self._seeded.removesuffix('seeded')}* that another program wrote",
            address=self._where,
            key=key,
        )

    def _number(self, key: str, value: object, *, at_least: int = 0) -> int:
        if isinstance(value, bytes) and _NUMBER.fullmatch(value) and int(value) >= at_least:
            return int(value)
        raise self._malformed(key, value)

    def _incarnation(self, value: object) -> Incarnation:
        match = _INCARNATION.fullmatch(value) if isinstance(value, bytes) else None
        if match is None or max(int(match[1]), int(match[2])) > _MAX_EXACT:
            raise self._malformed("incarnations", value)
        return Incarnation(int(match[1]), int(match[2]))


def _parse(address: str) -> tuple[str, str]:
    """Returns the URL for redis-py, and host:port for messages, without credentials.

    Raises:
        UsageError: ``CONFIG_INVALID``. The message never repeats the address, which may hold a
            password.
    """
    url = address if "://" in address else f"redis://{address}"
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError:
        parts, port = urlsplit(""), 0
    database = parts.path.removeprefix("/")
    known = parts.scheme in ("redis", "rediss") and (database.isdecimal() or not database)
    if not known or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(
            Reason.CONFIG_INVALID,
            "the address of Redis cannot be read; write redis://[user:password@]host[:port][/db], "
            "rediss:// for TLS, or host:port",
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return url, f"{host}:{port}"
