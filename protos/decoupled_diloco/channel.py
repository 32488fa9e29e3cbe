"""gRPC as this project uses it: options, addresses, deadlines, and errors on the wire.

Bulk and control ride on connections of their own (``own_connection``), so that a full link never
delays a heartbeat. Both ends set keepalive, since each end's default would cut the other's pings
off. Message limits stay at gRPC's default of 4 MiB: tensors travel in 1 MiB chunks.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
from typing import Final, NamedTuple, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from decoupled_diloco.errors import DOMAIN, DilocoError, Reason, UsageError

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""Largest message either end takes; a chunk of 1 MiB and its header fit."""

MAX_LISTING_MESSAGE_BYTES: Final = 256 * 1024 * 1024
"""Largest message that a standby takes of its leader, and who looks of a synchronizer: a round
record and a status name every learner."""

KEEPALIVE_INTERVAL_S: Final = 10.0
KEEPALIVE_TIMEOUT_S: Final = 5.0
MIN_PING_INTERVAL_S: Final = 5.0
"""Shortest interval of a client's pings that a server puts up with; below the client's own."""

RECONNECT_INITIAL_S: Final = 0.2
RECONNECT_MAX_S: Final = 3.0
CONNECT_TIMEOUT_S: Final = 5.0
RESOLVE_INTERVAL_S: Final = 1.0
"""Shortest interval between two DNS look-ups: a restarted synchronizer may have a new address."""

JOIN_DEADLINE_S: Final = 30.0
LEAVE_DEADLINE_S: Final = 5.0
LEASE_DEADLINE_S: Final = 10.0
ADMIN_DEADLINE_S: Final = 10.0

_DETAILS_KEY: Final = "grpc-status-details-bin"
# Trailing metadata may be refused from 8 KiB on. The message travels twice, once percent-encoded
# (3 bytes each), once with the details (base64).
_MAX_MESSAGE_BYTES: Final = 900
_MAX_DETAIL_BYTES: Final = 150
_MAX_DETAILS: Final = 8

# mallopt parameters of glibc (malloc.h) with the values that bulk transfers want.
_MALLOPT: Final = (
    (-3, 32 * 1024 * 1024),  # M_MMAP_THRESHOLD, its largest value
    (-1, 1024 * 1024 * 1024),  # M_TRIM_THRESHOLD
    (-2, 64 * 1024 * 1024),  # M_TOP_PAD
)

_STATUS_REASONS: Final = {
    grpc.StatusCode.UNAVAILABLE: Reason.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Reason.UNAVAILABLE,
    grpc.StatusCode.CANCELLED: Reason.UNAVAILABLE,
    # With no word of ours: gRPC itself, whose connection broke in the middle of a message.
    grpc.StatusCode.INTERNAL: Reason.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.OUT_OF_MEMORY_BUDGET,
    grpc.StatusCode.UNIMPLEMENTED: Reason.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT: Reason.MALFORMED,
    grpc.StatusCode.DATA_LOSS: Reason.CORRUPT,
}

logger = logging.getLogger(__name__)

Options = list[tuple[str, object]]


class Address(NamedTuple):
    """A host and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: str) -> Address:
    """Reads ``host:port``; an IPv6 address stands in brackets. Port 0 asks for a free one.

    Raises:
        UsageError: CONFIG_INVALID.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else -1
    well_formed = colon and name and not any(c.isspace() or c in "/[]@" for c in name)
    if not well_formed or not 0 <= number <= 65535 or (":" in name and not bracketed):
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"address is {text!r}; expected host:port, for example 127.0.0.1:50051 or [::1]:50051",
        )
    return Address(name, number)


def is_loopback(address: str | Address) -> bool:
    """Whether an address (``host:port``) can only be reached from this machine.

    Raises:
        UsageError: CONFIG_INVALID where it is no address.
    """
    host = (parse_address(address) if isinstance(address, str) else address).host
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local_name(host: str) -> bool:
    """Whether a Host header, with a port or without, names this machine by a loopback address.

    A page from elsewhere cannot send one: its own name may lead here, but stays in the header.
    """
    has_port = ":" in host.rpartition("]")[2]
    try:
        return is_loopback(host if has_port else f"{host}:0")
    except UsageError:
        return False


def require_secure(address: str | Address, *, insecure: bool) -> None:
    """Refuses a plaintext connection beyond this machine unless it was asked for aloud.

    Raises:
        UsageError: CONFIG_CONFLICT naming ``--insecure``.
    """
    if not insecure and not is_loopback(address):
        raise UsageError(
            Reason.CONFIG_CONFLICT,
            f"address {address} is not on this machine, and the connection would be neither "
            "encrypted nor authenticated; use a loopback address, or say --insecure if the "
            "network between the machines is yours alone",
        )


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _common_options(*, receive_bytes: int = MAX_MESSAGE_BYTES, send_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", receive_bytes),
        ("grpc.max_send_message_length", send_bytes),
        ("grpc.keepalive_time_ms", _milliseconds(KEEPALIVE_INTERVAL_S)),
        ("grpc.keepalive_timeout_ms", _milliseconds(KEEPALIVE_TIMEOUT_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(
    address: str | Address,
    purpose: str,
    *,
    own_connection: bool = True,
    receive_bytes: int = MAX_MESSAGE_BYTES,
) -> Options:
    """Options of a client's channel.

    Args:
        address: where the channel leads; a loopback address never goes through an HTTP proxy.
        purpose: short word, for example "control" or "bulk"; part of the user agent.
        own_connection: True for a TCP connection that no other channel of this process shares.
        receive_bytes: largest message that is taken.
    """
    options = [
        *_common_options(receive_bytes=receive_bytes, send_bytes=MAX_MESSAGE_BYTES),
        ("grpc.primary_user_agent", f"decoupled-diloco-{purpose}"),
        ("grpc.initial_reconnect_backoff_ms", _milliseconds(RECONNECT_INITIAL_S)),
        ("grpc.max_reconnect_backoff_ms", _milliseconds(RECONNECT_MAX_S)),
        ("grpc.min_reconnect_backoff_ms", _milliseconds(CONNECT_TIMEOUT_S)),
        ("grpc.dns_min_time_between_resolutions_ms", _milliseconds(RESOLVE_INTERVAL_S)),
        ("grpc.use_local_subchannel_pool", int(own_connection)),
    ]
    if is_loopback(address):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def server_options() -> Options:
    """Options of a server. A port is never shared: a second server on it must fail, loudly."""
    return [
        *_common_options(send_bytes=MAX_LISTING_MESSAGE_BYTES),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _milliseconds(MIN_PING_INTERVAL_S)),
        # No strikes: a learner that trains through an outage pings a server that has no calls.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


def open_channel(
    address: str | Address,
    purpose: str,
    *,
    own_connection: bool = True,
    insecure: bool = False,
    receive_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """Opens a channel; it connects when it is first used, and reconnects by itself.

    Args:
        address: ``host:port`` of the server.
        purpose: what the channel is for, see ``channel_options``.
        own_connection: see ``channel_options``.
        insecure: True where plaintext to another machine was asked for.
        receive_bytes: see ``channel_options``.

    Raises:
        UsageError: CONFIG_INVALID for no address, CONFIG_CONFLICT for plaintext to elsewhere.
    """
    target = parse_address(address) if isinstance(address, str) else address
    require_secure(target, insecure=insecure)
    options = channel_options(
        target, purpose, own_connection=own_connection, receive_bytes=receive_bytes
    )
    return grpc.aio.insecure_channel(str(target), options=options)


def add_port(server: grpc.aio.Server, address: str | Address, *, insecure: bool = False) -> int:
    """Binds a server made with ``server_options`` to an address.

    Returns:
        The port, chosen by the system where the address says 0.

    Raises:
        UsageError: PORT_IN_USE where the address cannot be bound; and what ``open_channel`` raises.
    """
    target = parse_address(address) if isinstance(address, str) else address
    require_secure(target, insecure=insecure)
    try:
        port = server.add_insecure_port(str(target))
    except RuntimeError as error:
        raise not_bound(target) from error
    if port == 0:
        raise not_bound(target)
    return port


def not_bound(address: Address) -> UsageError:
    """The error for an address that nobody can listen on."""
    return UsageError(
        Reason.PORT_IN_USE,
        f"cannot listen on {address}: the port is taken by another process or the address is not "
        "of this machine; choose another one, or port 0 for a free port",
        address=address,
    )


def tune_allocator() -> bool:
    """Tells glibc to keep freed memory, which bulk transfers re-use; call once at process start.

    Returns:
        True where it was done; elsewhere than on glibc nothing is changed.
    """
    try:
        is_glibc = bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (ValueError, OSError):
        return False
    if not is_glibc:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    results = [mallopt(parameter, value) for parameter, value in _MALLOPT]
    return results == [1] * len(_MALLOPT)


def _clip(text: str, max_bytes: int) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - 3].decode(errors="ignore") + "..."


def to_status(error: DilocoError) -> grpc.Status:
    """The gRPC status of an error, with a ``google.rpc.ErrorInfo`` attached."""
    facts = list(error.details.items())[:_MAX_DETAILS]
    info = error_details_pb2.ErrorInfo(
        reason=error.reason.value,
        domain=DOMAIN,
        metadata={key: _clip(value, _MAX_DETAIL_BYTES) for key, value in facts},
    )
    packed = any_pb2.Any()
    packed.Pack(info)
    code: int = grpc.StatusCode[error.entry.status].value[0]
    message = _clip(error.message, _MAX_MESSAGE_BYTES)
    return rpc_status.to_status(status_pb2.Status(code=code, message=message, details=[packed]))


async def abort(context: grpc.aio.ServicerContext[object, object], error: DilocoError) -> NoReturn:
    """Ends an RPC with the status of an error; always raises."""
    status = to_status(error)
    await context.abort(status.code, status.details, trailing_metadata=status.trailing_metadata)


def error_from_rpc(error: grpc.aio.AioRpcError) -> DilocoError:
    """The error that a peer answered with, or the nearest one where gRPC itself failed.

    An unreachable peer, a passed deadline and a cut connection are ``UNAVAILABLE``; nothing in
    the answer is trusted, and what cannot be read counts as absent.
    """
    told = _error_info(error)
    text = error.details() or error.code().name
    if told is not None:
        try:
            reason = Reason(told.reason)
        except ValueError:
            text = f"{told.reason}: {text}"
        else:
            facts = {str(key): value for key, value in told.metadata.items()}
            return _build(reason, text, facts)
    reason = _STATUS_REASONS.get(error.code(), Reason.INTERNAL)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        reason = Reason.OVERSIZED
    return _build(reason, text, {"status": error.code().name})


def _build(reason: Reason, message: str, facts: dict[str, str]) -> DilocoError:
    made = DilocoError(reason, message)
    made.details.update(facts)
    return made


def _error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    """Our ErrorInfo among the trailing metadata; None where there is none or it is broken."""
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info) and info.domain == DOMAIN:
                    return info
        except DecodeError:
            logger.warning("unreadable error details from a peer")
    return None
