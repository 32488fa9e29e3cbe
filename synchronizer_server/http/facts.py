"""What the status page shows, as one JSON object; docs/status-page.md describes it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from decoupled_diloco.fault_points import wall
from decoupled_diloco.plain import to_plain
from decoupled_diloco.v1 import admin_pb2
from synchronizer_server.engine import Engine
from synchronizer_server.http.history import History, Remembered
from synchronizer_server.leadership import Leadership
from synchronizer_server.membership import RedisClient
from synchronizer_server.metrics import Exposition, Source

FORMAT: Final = 1
"""Version of the shape; new keys do not change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the page gets its facts.

    Attributes:
        source: what this process sees now, of which its metrics are made, too; asked in the event
            loop.
        metrics: takes the values of a scrape, in the event loop, and returns what makes the answer
            of them, in a thread.
        history: what it remembers.
        address: where others reach this synchronizer, host:port.
        peers: the same of the other synchronizers.
        store: directory of the store.
        durability: setting of the store.
        redis: membership and lease; None where they are in memory.
        leadership: our part in the election; None where no other synchronizer can lead.
    """

    source: Source
    metrics: Callable[[], Callable[[], Exposition]]
    history: History
    address: str
    peers: tuple[str, ...]
    store: Path
    durability: str
    redis: RedisClient | None
    leadership: Leadership | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One look, complete in itself: what follows from it may be worked out in another thread.

    Attributes:
        time: when, seconds since the epoch.
        status: what this process sees.
        remembered: what it remembers.
        leader_address: where the leader is reached; empty where unknown.
        redis: the object of that name; None where membership is in memory.
        store_state: what is known of the store, in one word.
        store_failure: code of the failure that lasts.
        published_s: seconds since this term published a round; None before the first.
    """

    time: float
    status: admin_pb2.GetStatusResponse
    remembered: Remembered
    leader_address: str
    redis: dict[str, str] | None
    store_state: str
    store_failure: str
    published_s: float | None


def look(sources: Sources) -> Seen:
    """Looks at everything; for the event loop."""
    source, leadership = sources.source, sources.leadership
    status, engine = source.status(), source.engine()
    address = sources.address
    if status.role != "leading":
        address = "" if leadership is None else leadership.leader_address()
    store_state, store_failure, published_s = "unknown", "", None
    if engine is not None:
        vitals = engine.vitals
        store_failure = str(vitals.store_failure or "")
        store_state = "failing" if store_failure else "working"
        if vitals.published_at is not None:
            published_s = engine.parts.clock() - vitals.published_at
    return Seen(
        time=wall(),
        status=status,
        remembered=sources.history.remembered(),
        leader_address=address,
        redis=None if sources.redis is None else _redis(sources.redis, source, engine),
        store_state=store_state,
        store_failure=store_failure,
        published_s=published_s,
    )


def encode(sources: Sources, seen: Seen) -> bytes:
    """Returns a look as JSON in one line; for a thread, since it asks the file system.

    Args:
        sources: where the facts are from.
        seen: the look.
    """
    remembered = seen.remembered
    values = {
        "format": FORMAT,
        "time": seen.time,
        "address": sources.address,
        "peers": sources.peers,
        "leader": _leader(seen),
        "status": to_plain(seen.status),
        "redis": seen.redis,
        "store": _store(sources, seen),
        "published_s": seen.published_s,
        "shares": remembered.shares,
        "losses": remembered.losses,
        "events": [dataclasses.asdict(x) for x in remembered.events],
    }
    return json.dumps(values, separators=(",", ":"), allow_nan=False).encode()


def _leader(seen: Seen) -> dict[str, Any] | None:
    """Who leads, as far as is known here; None for nobody."""
    claim = seen.status.claim
    if not claim.term:
        return None
    return {"leader_id": claim.leader_id, "term": claim.term, "address": seen.leader_address}


def _redis(redis: RedisClient, source: Source, engine: Engine | None) -> dict[str, str]:
    """Fails where one of the metrics says so that are about it."""
    failure = None if engine is None else engine.vitals.membership_failure
    fails = failure is not None or source.keeper_answers() is False
    detail = redis.trouble or str(failure or "its answers are not ours") if fails else ""
    state = "failing" if fails else "unknown" if redis.trouble is None else "working"
    return {"address": redis.where, "state": state, "detail": detail}


def _store(sources: Sources, seen: Seen) -> dict[str, Any]:
    try:
        num_free: int | None = shutil.disk_usage(sources.store).free
    except OSError:
        num_free = None
    return {
        "directory": str(sources.store),
        "durability": sources.durability,
        "state": seen.store_state,
        "reason": seen.store_failure,
        "bytes_free": num_free,
    }
