"""The border between the synchronizer and Redis, shared by membership and lease.

Foreign errors are mapped here, every call is bounded in time, and nothing that Redis says is
believed before it was checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import redis.asyncio as redis_asyncio
from redis import exceptions as redis_errors
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.versions import Incarnation

MAX_EXACT: Final = 2**53 - 1
"""Highest number that is written: Lua's numbers are doubles."""

MAX_TERM: Final = 2**50
"""Highest term that is believed: one above which nobody could bid would end the run for ever."""

Script = Callable[[Sequence[str], Sequence[str | int]], Coroutine[Any, Any, object]]
"""Runs a script with keys and arguments; the answer is not checked yet."""

_BROKEN: Final = "the handler is closed"
_INCARNATION: Final = re.compile(rb"(\d{1,16})\.(\d{1,16})")
_NUMBER: Final = re.compile(rb"\d{1,18}")
_MALFORMED: Final = re.compile(r"MALFORMED (\w+)")


class RedisClient:
    """Connections of one process to a Redis server (5 or newer), for one group of one run.

    A call never takes longer than ``timeout_s``: a Redis that is gone or frozen gives
    ``MEMBERSHIP_UNAVAILABLE``, and the next call tries again.

    Args:
        address: ``redis://[user:password@]host[:port][/db]``, ``rediss://...``, or ``host:port``.
        run_id: the run; it is part of every key.
        group: group of fragments.
        timeout_s: bound on connecting, on an answer, and on a whole call.

    Attributes:
        run_id: the run.
        where: host:port, without credentials.
        trouble: why the last call failed; empty where it was answered, None before the first.

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
        url, self.where = _parse(address)
        self.run_id = run_id
        self.trouble: str | None = None
        # the braces make a Redis cluster keep all keys of a run on one node, as scripts need
        self._prefix = f"diloco:{{{run_id}}}:g{group}:"
        self._timeout_s = timeout_s
        self._redis = redis_asyncio.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # a connection that broke while idle is replaced at once; time-outs are not repeated
            retry=Retry(NoBackoff(), 1, supported_errors=(redis_errors.ConnectionError,)),
            decode_responses=False,
        )

    def key(self, name: str) -> str:
        """The full key of one thing of this group of this run."""
        return self._prefix + name

    def script(self, text: str) -> Script:
        """A Lua script as a call: one EVALSHA, loaded first where Redis does not know it."""
        registered = self._redis.register_script(text)

        async def run(keys: Sequence[str], args: Sequence[str | int]) -> object:
            async with self._errors():
                return await registered(keys=keys, args=args)

        return run

    async def get(self, name: str) -> object:
        """What a key holds, as bytes that are not checked yet; None where there is none."""
        async with self._errors():
            return await self._redis.get(self.key(name))

    async def aclose(self) -> None:
        """Closes the connections. Calling it again does nothing."""
        with contextlib.suppress(redis_errors.RedisError, OSError, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._redis.aclose()

    def malformed(self, key: str, value: object) -> DilocoError:
        """The error for something that is not ours."""
        return DilocoError(
            Reason.MALFORMED,
            f"Redis at {self.where} holds a {key} that is not ours ({str(value)[:100]}); remove "
            f"the keys of {self._prefix}* that another program wrote",
            address=self.where,
            key=key,
        )

    def number(self, key: str, value: object, *, at_least: int = 0) -> int:
        """Reads a decimal number.

        Raises:
            DilocoError: ``MALFORMED``.
        """
        if isinstance(value, bytes) and _NUMBER.fullmatch(value) and int(value) >= at_least:
            return int(value)
        raise self.malformed(key, value)

    def term(self, key: str, value: object) -> int:
        """Reads a term of leadership, from 1.

        Raises:
            DilocoError: ``MALFORMED``.
        """
        term = self.number(key, value, at_least=1)
        if term > MAX_TERM:
            raise self.malformed(key, value)
        return term

    def text(self, key: str, value: object) -> str:
        """Reads UTF-8.

        Raises:
            DilocoError: ``MALFORMED``.
        """
        try:
            if isinstance(value, bytes):
                return value.decode()
        except UnicodeDecodeError:
            pass
        raise self.malformed(key, value)

    def incarnation(self, value: object) -> Incarnation:
        """Reads "term.number".

        Raises:
            DilocoError: ``MALFORMED``.
        """
        match = _INCARNATION.fullmatch(value) if isinstance(value, bytes) else None
        if match is None or max(int(match[1]), int(match[2])) > MAX_EXACT:
            raise self.malformed("incarnations", value)
        return Incarnation(int(match[1]), int(match[2]))

    @contextlib.asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """The border: everything that redis-py may raise becomes one of two reasons."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except redis_errors.ResponseError as error:
            text = str(error)
            found = _MALFORMED.search(text)
            if found is not None or "WRONGTYPE" in text:
                raise self.malformed(found[1] if found else "value", text[-100:]) from error
            raise self._unavailable(text) from error
        except TimeoutError as error:
            raise self._unavailable(f"no answer within {self._timeout_s} s") from error
        except (redis_errors.RedisError, OSError) as error:
            raise self._unavailable(str(error)) from error
        except RuntimeError as error:
            # So says uvloop where a connection has broken since the last look at it.
            if _BROKEN not in str(error):
                raise
            raise self._unavailable("its connection broke") from error
        else:
            self.trouble = ""

    def _unavailable(self, why: str) -> DilocoError:
        self.trouble = why
        return DilocoError(
            Reason.MEMBERSHIP_UNAVAILABLE,
            f"Redis at {self.where} cannot be used ({why}); check that it runs, that this "
            "address is right and that the password fits",
            address=self.where,
        )


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
