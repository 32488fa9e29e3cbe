"""Settings of one synchronizer process; what learners must agree on is in `RunSettings`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from decoupled_diloco.channel import parse_address
from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.setting_fields import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where a synchronizer listens and keeps its things.

    Raises:
        UsageError: CONFIG_INVALID, naming the setting.
    """

    address: str = setting("127.0.0.1:50051", "host:port to listen on; port 0 takes any")
    store: Path = setting(Path("store"), "directory of the durable store; one run, one writer")
    snapshots: Path | None = setting(
        None,
        "directory of the fleet's snapshots, shared by all synchronizers of a run "
        "[default: within the store]",
    )
    durability: str = setting(
        "disk",
        "disk: fsync before publish; standby: acknowledged by a standby, else as disk; async: a "
        "power cut may lose rounds",
    )
    redis: str | None = setting(
        None,
        "redis://host:port of membership and lease, needed with peers; without it, in memory",
        secret=True,
    )
    peers: str = setting("", "addresses of the other synchronizers of the run, separated by commas")
    advertise: str = setting(
        "", "host:port at which others reach this synchronizer [default: the address]"
    )
    key_file: Path | None = setting(
        None, "file with the secret that signs claims of leadership; the same for all synchronizers"
    )
    journal: Path | None = setting(None, "file of events as JSON lines; none without it")
    health_address: str | None = setting(
        None, "host:port of a plaintext port for health checks alone"
    )
    http_address: str | None = setting(
        None, "host:port of the status page, plain HTTP that only shows; none without it"
    )
    drain_s: float = setting(10.0, "how long rounds in flight may take after SIGTERM")
    max_staged_mb: int = setting(2048, "MiB of pushes under way; more are told to come later")
    threads: int = setting(1, "torch threads for merging")
    insecure: bool = setting(False, "allow plaintext beyond loopback")
    log_format: str = setting("text", "text or json")

    @property
    def peer_addresses(self) -> tuple[str, ...]:
        """Addresses of the other synchronizers."""
        return tuple(x.strip() for x in self.peers.split(",") if x.strip())

    def __post_init__(self) -> None:
        parse_address(self.address)
        for address in (*self.peer_addresses, *([self.advertise] if self.advertise else [])):
            parse_address(address)
        for plain in (self.health_address, self.http_address):
            if plain is not None:
                parse_address(plain)
        for name, allowed in (
            ("durability", ("disk", "standby", "async")),
            ("log_format", ("text", "json")),
        ):
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
