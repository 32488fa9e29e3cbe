"""What the status page shows, as one JSON object; docs/status-page.md describes it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from decoupled_diloco.plain import to_plain
from decoupled_diloco.v1 import admin_pb2
from synchronizer_server.http.history import History, Remembered
from synchronizer_server.leadership import Leadership
from synchronizer_server.membership import RedisClient

FORMAT: Final = 1
"""Version of the shape; new keys do not change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the page gets its facts.

    Attributes:
        status: what this process sees now; asked in the event loop.
        metrics: what a scrape is answered with, body and content type; asked in the event loop.
        history: what it remembers.
        address: where others reach this synchronizer, host:port.
        peers: the same of the other synchronizers.
        store: directory of the store.
        durability: setting of the store.
        redis: membership and lease; None where they are in memory.
        leadership: our part in the election; None where no other synchronizer can lead.
    """

    status: Callable[[], admin_pb2.GetStatusResponse]
    metrics: Callable[[], tuple[bytes, str]]
    history: History
    address: str
    peers: tuple[str, ...]
    store: Path
    durability: str
    redis: RedisClient | None
    leadership: Leadership | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One look, complete in itself: what follows from it may be worked out in another thread."""

    time: float
    status: admin_pb2.GetStatusResponse
    remembered: Remembered
    leader_address: str
    redis_trouble: str | None


def look(sources: Sources) -> Seen:
    """Looks at everything; for the event loop."""
    status = sources.status()
    leadership, redis = sources.leadership, sources.redis
    address = sources.address
    if status.role != "leading":
        address = "" if leadership is None else leadership.leader_address()
    return Seen(
        time=time.time(),
        status=status,
        remembered=sources.history.remembered(),
        leader_address=address,
        redis_trouble=None if redis is None else redis.trouble,
    )


def encode(sources: Sources, seen: Seen, pause_s: float) -> bytes:
    """Returns a look as JSON in one line; for a thread, since it asks the file system.

    Args:
        sources: where the facts are from.
        seen: the look.
        pause_s: how long the next look is away.
    """
    status, remembered = seen.status, seen.remembered
    values = {
        "format": FORMAT,
        "time": seen.time,
        "pause_s": pause_s,
        "address": sources.address,
        "peers": sources.peers,
        "leader": _leader(seen),
        "status": to_plain(status),
        "redis": _redis(sources.redis, seen.redis_trouble),
        "store": _store(sources, remembered),
        "published_s": remembered.published_s,
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


def _redis(redis: RedisClient | None, trouble: str | None) -> dict[str, Any] | None:
    if redis is None:
        return None
    state = "unknown" if trouble is None else "unreachable" if trouble else "reachable"
    return {"address": redis.where, "state": state, "detail": trouble or ""}


def _store(sources: Sources, remembered: Remembered) -> dict[str, Any]:
    try:
        num_free: int | None = shutil.disk_usage(sources.store).free
    except OSError:
        num_free = None
    return {
        "directory": str(sources.store),
        "durability": sources.durability,
        "state": "failing" if remembered.store_trouble else "working",
        "reason": remembered.store_trouble,
        "bytes_free": num_free,
    }
