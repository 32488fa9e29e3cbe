"""The catalogue of reasons: everything that can go wrong, with one stable code each.

A reason code travels unchanged from where a fault is found to whoever must act on it: it is the
``reason`` of the ``google.rpc.ErrorInfo`` on the wire, the word in logs and metrics, and it
decides the exit code of a process. Codes are never renamed or reused.

    DilocoError                 root of every error that this project raises
      UsageError (ValueError)   the user's mistake: settings, data, files, arguments
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

DOMAIN: Final = "decoupled-diloco"
"""``domain`` of the ErrorInfo attached to every error status."""

EXIT_OK: Final = 0
EXIT_USAGE: Final = 64
EXIT_INCOMPATIBLE: Final = 65
EXIT_INTERNAL: Final = 70
EXIT_STORAGE: Final = 74
EXIT_RETRY: Final = 75
EXIT_TOLD_TO_LEAVE: Final = 80
"""Of a learner that an operator drained: whoever starts processes again leaves it alone."""
EXIT_DRAINED: Final = 143


class Reason(StrEnum):
    """Stable reason codes; the value equals the name."""

    # settings, arguments, data
    CONFIG_INVALID = "CONFIG_INVALID"
    CONFIG_UNKNOWN_KEY = "CONFIG_UNKNOWN_KEY"
    CONFIG_CONFLICT = "CONFIG_CONFLICT"
    QUORUM_ABOVE_LEARNERS = "QUORUM_ABOVE_LEARNERS"
    PORT_IN_USE = "PORT_IN_USE"
    DATA_MISSING = "DATA_MISSING"
    DATA_EMPTY = "DATA_EMPTY"
    DATA_BINARY = "DATA_BINARY"
    DATA_MISMATCH = "DATA_MISMATCH"
    RUN_NOT_FOUND = "RUN_NOT_FOUND"
    DEVICE_UNAVAILABLE = "DEVICE_UNAVAILABLE"
    # chaos
    FAULT_IMPOSSIBLE = "FAULT_IMPOSSIBLE"
    TARGET_NOT_FOUND = "TARGET_NOT_FOUND"
    ENGINE_UNAVAILABLE = "ENGINE_UNAVAILABLE"
    # joining
    PROTOCOL_MISMATCH = "PROTOCOL_MISMATCH"
    RUN_MISMATCH = "RUN_MISMATCH"
    LAYOUT_MISMATCH = "LAYOUT_MISMATCH"
    LAYOUT_IMPOSSIBLE = "LAYOUT_IMPOSSIBLE"
    NO_SHARD_LEFT = "NO_SHARD_LEFT"
    UNKNOWN_LEARNER = "UNKNOWN_LEARNER"
    FENCED = "FENCED"
    STALE_TERM = "STALE_TERM"
    NOT_LEADING = "NOT_LEADING"
    BAD_CLAIM = "BAD_CLAIM"
    QUARANTINED = "QUARANTINED"
    TOO_MANY_STREAMS = "TOO_MANY_STREAMS"
    DRAINING = "DRAINING"
    STARTING = "STARTING"
    UNAVAILABLE = "UNAVAILABLE"
    # pushes
    NOT_ASKED = "NOT_ASKED"
    NOT_READY = "NOT_READY"
    TOO_LATE = "TOO_LATE"
    NO_PROGRESS = "NO_PROGRESS"
    LEARNER_GONE = "LEARNER_GONE"
    DUPLICATE = "DUPLICATE"
    ALREADY_MERGED = "ALREADY_MERGED"
    STALE_BASE = "STALE_BASE"
    BASE_MISMATCH = "BASE_MISMATCH"
    UNKNOWN_FRAGMENT = "UNKNOWN_FRAGMENT"
    NON_FINITE = "NON_FINITE"
    NORM_BOUND = "NORM_BOUND"
    BAD_COUNTERS = "BAD_COUNTERS"
    TRUNCATED = "TRUNCATED"
    OVERSIZED = "OVERSIZED"
    CORRUPT = "CORRUPT"
    CODEC_MISMATCH = "CODEC_MISMATCH"
    OFFSET_MISMATCH = "OFFSET_MISMATCH"
    OUT_OF_MEMORY_BUDGET = "OUT_OF_MEMORY_BUDGET"
    MALFORMED = "MALFORMED"
    ROLLED_BACK = "ROLLED_BACK"
    # updates
    DIGEST_MISMATCH = "DIGEST_MISMATCH"
    # recovery, data, snapshots
    NO_DONOR = "NO_DONOR"
    RECOVERY_VOID = "RECOVERY_VOID"
    LEASE_LOST = "LEASE_LOST"
    SNAPSHOT_FAILED = "SNAPSHOT_FAILED"
    SNAPSHOT_NOT_FOUND = "SNAPSHOT_NOT_FOUND"
    # storage
    STORE_CORRUPT = "STORE_CORRUPT"
    STORE_LOST = "STORE_LOST"
    STORE_REMOVED = "STORE_REMOVED"
    STORE_LOCKED = "STORE_LOCKED"
    DISK_FULL = "DISK_FULL"
    STORAGE_FAILED = "STORAGE_FAILED"
    MEMBERSHIP_UNAVAILABLE = "MEMBERSHIP_UNAVAILABLE"
    # rest
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a reason means to a machine.

    Attributes:
        status: gRPC status code name with which a server answers.
        exit_code: exit code of a process that ends for this reason.
        retry: True where the same request may succeed later without a change by the user.
    """

    status: str
    exit_code: int
    retry: bool = False


_USAGE = Entry(status="INVALID_ARGUMENT", exit_code=EXIT_USAGE)
_INCOMPATIBLE = Entry(status="INVALID_ARGUMENT", exit_code=EXIT_INCOMPATIBLE)
_FENCED = Entry(status="FAILED_PRECONDITION", exit_code=EXIT_INCOMPATIBLE)
_LATER = Entry(status="UNAVAILABLE", exit_code=EXIT_RETRY, retry=True)
_DROPPED = Entry(status="ABORTED", exit_code=EXIT_RETRY, retry=True)
_BAD_BYTES = Entry(status="DATA_LOSS", exit_code=EXIT_INTERNAL, retry=True)
_BAD_PUSH = Entry(status="INVALID_ARGUMENT", exit_code=EXIT_INTERNAL)
_STORAGE = Entry(status="INTERNAL", exit_code=EXIT_STORAGE)

CATALOGUE: Final[dict[Reason, Entry]] = {
    Reason.CONFIG_INVALID: _USAGE,
    Reason.CONFIG_UNKNOWN_KEY: _USAGE,
    Reason.CONFIG_CONFLICT: _USAGE,
    Reason.QUORUM_ABOVE_LEARNERS: _USAGE,
    Reason.PORT_IN_USE: _USAGE,
    Reason.DATA_MISSING: _USAGE,
    Reason.DATA_EMPTY: _USAGE,
    Reason.DATA_BINARY: _USAGE,
    Reason.DATA_MISMATCH: _INCOMPATIBLE,
    Reason.RUN_NOT_FOUND: _USAGE,
    Reason.DEVICE_UNAVAILABLE: _USAGE,
    Reason.FAULT_IMPOSSIBLE: _USAGE,
    Reason.TARGET_NOT_FOUND: _USAGE,
    Reason.ENGINE_UNAVAILABLE: _USAGE,
    Reason.PROTOCOL_MISMATCH: Entry(status="FAILED_PRECONDITION", exit_code=EXIT_INCOMPATIBLE),
    Reason.RUN_MISMATCH: _FENCED,
    Reason.LAYOUT_MISMATCH: _INCOMPATIBLE,
    Reason.LAYOUT_IMPOSSIBLE: _INCOMPATIBLE,
    Reason.NO_SHARD_LEFT: Entry(status="FAILED_PRECONDITION", exit_code=EXIT_USAGE),
    Reason.UNKNOWN_LEARNER: Entry(status="NOT_FOUND", exit_code=EXIT_RETRY, retry=True),
    Reason.FENCED: _FENCED,
    Reason.STALE_TERM: Entry(status="FAILED_PRECONDITION", exit_code=EXIT_RETRY, retry=True),
    Reason.NOT_LEADING: _LATER,
    Reason.BAD_CLAIM: Entry(status="PERMISSION_DENIED", exit_code=EXIT_INCOMPATIBLE),
    Reason.QUARANTINED: _DROPPED,
    Reason.TOO_MANY_STREAMS: Entry(status="RESOURCE_EXHAUSTED", exit_code=EXIT_RETRY, retry=True),
    Reason.DRAINING: _LATER,
    Reason.STARTING: _LATER,
    Reason.UNAVAILABLE: _LATER,
    Reason.NOT_ASKED: _DROPPED,
    Reason.NOT_READY: _DROPPED,
    Reason.TOO_LATE: _DROPPED,
    Reason.NO_PROGRESS: _DROPPED,
    Reason.LEARNER_GONE: _DROPPED,
    Reason.DUPLICATE: Entry(status="ALREADY_EXISTS", exit_code=EXIT_INTERNAL),
    Reason.ALREADY_MERGED: _DROPPED,
    Reason.STALE_BASE: _DROPPED,
    Reason.BASE_MISMATCH: _DROPPED,
    Reason.UNKNOWN_FRAGMENT: Entry(status="NOT_FOUND", exit_code=EXIT_INTERNAL),
    Reason.NON_FINITE: _BAD_PUSH,
    Reason.NORM_BOUND: _BAD_PUSH,
    Reason.BAD_COUNTERS: _BAD_PUSH,
    Reason.TRUNCATED: _BAD_BYTES,
    Reason.OVERSIZED: _BAD_PUSH,
    Reason.CORRUPT: _BAD_BYTES,
    Reason.CODEC_MISMATCH: _BAD_PUSH,
    Reason.OFFSET_MISMATCH: Entry(status="OUT_OF_RANGE", exit_code=EXIT_INTERNAL, retry=True),
    Reason.OUT_OF_MEMORY_BUDGET: Entry(
        status="RESOURCE_EXHAUSTED", exit_code=EXIT_RETRY, retry=True
    ),
    Reason.MALFORMED: _BAD_PUSH,
    Reason.ROLLED_BACK: _DROPPED,
    Reason.DIGEST_MISMATCH: _BAD_BYTES,
    Reason.NO_DONOR: _LATER,
    Reason.RECOVERY_VOID: _DROPPED,
    Reason.LEASE_LOST: _DROPPED,
    Reason.SNAPSHOT_FAILED: Entry(status="ABORTED", exit_code=EXIT_STORAGE, retry=True),
    Reason.SNAPSHOT_NOT_FOUND: Entry(status="NOT_FOUND", exit_code=EXIT_USAGE),
    Reason.STORE_CORRUPT: _STORAGE,
    Reason.STORE_LOST: _STORAGE,
    Reason.STORE_REMOVED: Entry(status="UNAVAILABLE", exit_code=EXIT_RETRY, retry=True),
    Reason.STORE_LOCKED: _STORAGE,
    Reason.DISK_FULL: _STORAGE,
    Reason.STORAGE_FAILED: _STORAGE,
    Reason.MEMBERSHIP_UNAVAILABLE: _LATER,
    Reason.UNIMPLEMENTED: Entry(status="UNIMPLEMENTED", exit_code=EXIT_INTERNAL),
    Reason.INTERNAL: Entry(status="INTERNAL", exit_code=EXIT_INTERNAL),
}


class DilocoError(Exception):
    """Root of every error of this project.

    Args:
        reason: stable code from the catalogue.
        message: says what is wrong, where, and what to do.
        **details: small facts for logs and ``ErrorInfo.metadata`` (fragment, learner, path, ...).

    Attributes:
        reason: the code.
        message: the sentence without the code.
        details: the facts, as text.
    """

    def __init__(self, reason: Reason, message: str, **details: object) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.details = {key: str(value) for key, value in details.items()}

    @property
    def entry(self) -> Entry:
        """The catalogue's entry for this reason."""
        return CATALOGUE[self.reason]

    @property
    def exit_code(self) -> int:
        """Exit code of a process that ends for this error."""
        return self.entry.exit_code


class UsageError(DilocoError, ValueError):
    """The user's mistake: settings, data, files or arguments that cannot be right."""


def reason_of(code: str) -> Reason:
    """Returns the reason for a code heard from outside; ``INTERNAL`` where it is not ours."""
    try:
        return Reason(code)
    except ValueError:
        return Reason.INTERNAL
