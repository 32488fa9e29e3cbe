"""Settings of one synchronizer process; what learners must agree on is in `RunSettings`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from decoupled_diloco.channel import parse_address
from decoupled_diloco.errors import Reason, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where a synchronizer listens and keeps its things.

    Raises:
        UsageError: CONFIG_INVALID, naming the setting.
    """

    address: str = field(
        default="127.0.0.1:50051", metadata={"help": "host:port to listen on; port 0 takes any"}
    )
    store: Path = field(
        default=Path("store"),
        metadata={"help": "directory of the durable store; one run, one writer"},
    )
    durability: str = field(
        default="disk",
        metadata={"help": "disk: fsync before publish; async: a power cut may lose rounds"},
    )
    redis: str | None = field(
        default=None,
        metadata={"help": "redis://host:port of the membership; without it, in memory"},
    )
    journal: Path | None = field(
        default=None, metadata={"help": "file of events as JSON lines; none without it"}
    )
    health_address: str | None = field(
        default=None, metadata={"help": "host:port of a plaintext port for health checks alone"}
    )
    drain_s: float = field(
        default=10.0, metadata={"help": "how long rounds in flight may take after SIGTERM"}
    )
    max_staged_mb: int = field(
        default=2048, metadata={"help": "MiB of pushes under way; more are told to come later"}
    )
    threads: int = field(default=1, metadata={"help": "torch threads for merging"})
    insecure: bool = field(
        default=False, metadata={"help": "plaintext beyond loopback, said aloud"}
    )
    log_format: str = field(default="text", metadata={"help": "text or json"})

    def __post_init__(self) -> None:
        parse_address(self.address)
        if self.health_address is not None:
            parse_address(self.health_address)
        for name, allowed in (("durability", ("disk", "async")), ("log_format", ("text", "json"))):
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(
                    Reason.CONFIG_INVALID, f"{name} is {value!r}; one of {', '.join(allowed)}"
                )
        for name, low in (("drain_s", 0.0), ("max_staged_mb", 1), ("threads", 1)):
            if getattr(self, name) < low:
                raise UsageError(
                    Reason.CONFIG_INVALID, f"{name} is {getattr(self, name)}; at least {low}"
                )
