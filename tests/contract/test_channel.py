"""Addresses, options that both ends agree on, and errors that travel unchanged."""

from __future__ import annotations

import ctypes
import platform
import socket

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco import channel as ch
from decoupled_diloco.codecs import CHUNK_BYTES
from decoupled_diloco.errors import CATALOGUE, DilocoError, Reason, UsageError

METHOD = "/test.Service/Call"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051),
        ("localhost:0", "localhost", 0),
        ("[::1]:65535", "::1", 65535),
        ("synchronizer.hub.svc:443", "synchronizer.hub.svc", 443),
    ],
)
def test_an_address_is_read_and_written_back(text, host, port):
    address = ch.parse_address(text)
    assert address == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["", "host", ":1", "host:", "host:port", "host:-1", "host:65536", "::1:50051", "a b:1",
     "http://host:1", "host:٣", "[]:1", "host:1 ", "host:000001"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text):
    with pytest.raises(UsageError) as caught:
        ch.parse_address(text)
    assert caught.value.reason is Reason.CONFIG_INVALID
    assert "expected host:port" in caught.value.message


@given(st.text())
def test_any_text_is_an_address_or_one_clear_refusal(text):
    try:
        address = ch.parse_address(text)
    except UsageError:
        return
    assert ch.parse_address(str(address)) == address


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "LOCALHOST", "[::1]"])
def test_loopback_addresses_are_open_without_a_word(host):
    assert ch.is_loopback(f"{host}:1")
    ch.require_secure(f"{host}:1", insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "example.org", "[::]", "localhost.evil"])
def test_plaintext_to_elsewhere_must_be_said_aloud(host):
    assert not ch.is_loopback(f"{host}:1")
    with pytest.raises(UsageError, match="--insecure") as caught:
        ch.require_secure(f"{host}:1", insecure=False)
    assert caught.value.reason is Reason.CONFIG_CONFLICT
    ch.require_secure(f"{host}:1", insecure=True)


def test_the_server_puts_up_with_the_pings_that_the_client_sends():
    client = dict(ch.channel_options("127.0.0.1:1", "control"))
    server = dict(ch.server_options())
    tolerated = server["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert tolerated < client["grpc.keepalive_time_ms"]
    assert client["grpc.keepalive_permit_without_calls"] == 1
    assert server["grpc.keepalive_permit_without_calls"] == 1


def test_a_chunk_fits_the_message_limits_of_both_ends():
    for options in (ch.server_options(), ch.channel_options("127.0.0.1:1", "bulk")):
        for key in ("grpc.max_receive_message_length", "grpc.max_send_message_length"):
            assert dict(options)[key] > CHUNK_BYTES + 64 * 1024


def test_an_http_proxy_is_never_asked_about_this_machine():
    assert dict(ch.channel_options("localhost:1", "x"))["grpc.enable_http_proxy"] == 0
    assert "grpc.enable_http_proxy" not in dict(ch.channel_options("10.0.0.1:1", "x"))


def test_the_allocator_is_tuned_on_glibc_only(monkeypatch):
    assert ch.tune_allocator() is (platform.libc_ver()[0] == "glibc")

    def unknown(name):
        raise ValueError(name)

    def forbidden(name):
        raise AssertionError

    monkeypatch.setattr("os.confstr", unknown)
    monkeypatch.setattr(ctypes, "CDLL", forbidden)
    assert ch.tune_allocator() is False


class Server:
    """A real server with one method; counts the connections that its calls came over."""

    def __init__(self, behaviour, options=None):
        self.peers = set()

        async def handle(request, context):
            self.peers.add(context.peer())
            return await behaviour(request, context)

        handler = grpc.unary_unary_rpc_method_handler(handle)
        self.server = grpc.aio.server(options=options or ch.server_options())
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", {"Call": handler}),)
        )
        self.port = ch.add_port(self.server, "127.0.0.1:0")

    async def __aenter__(self):
        await self.server.start()
        return self

    async def __aexit__(self, *_):
        await self.server.stop(None)

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"


async def call(address, payload=b"", purpose="control", timeout=20):
    async with ch.open_channel(address, purpose) as channel:
        return await channel.unary_unary(METHOD)(payload, timeout=timeout)


async def failure(address, **kwargs):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(address, **kwargs)
    return ch.error_from_rpc(caught.value)


def aborting(error):
    async def behaviour(request, context):
        await ch.abort(context, error)

    return behaviour


async def echo(request, context):
    return request


@pytest.mark.asyncio
async def test_an_error_travels_with_reason_message_and_details():
    sent = DilocoError(Reason.LAYOUT_MISMATCH, "tensor 'wte' differs: ü", tensor="wte", reason_2=1)
    async with Server(aborting(sent)) as server:
        heard = await failure(server.address)
    assert (heard.reason, heard.message) == (sent.reason, sent.message)
    assert heard.details == {"tensor": "wte", "reason_2": "1"}


@pytest.mark.asyncio
async def test_every_reason_arrives_as_itself_with_the_status_of_the_catalogue():
    pending = list(Reason)

    async def behaviour(request, context):
        await ch.abort(context, DilocoError(Reason(request.decode()), "why"))

    async with Server(behaviour) as server, ch.open_channel(server.address, "x") as channel:
        for reason in pending:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(METHOD)(reason.encode(), timeout=20)
            assert caught.value.code().name == CATALOGUE[reason].status
            assert ch.error_from_rpc(caught.value).reason is reason


@pytest.mark.asyncio
async def test_a_huge_message_still_arrives_as_the_error_that_it_was():
    details = {f"key{i}": "ü" * 5000 for i in range(50)}
    sent = DilocoError(Reason.CORRUPT, "ü" * 50_000, **details)
    async with Server(aborting(sent)) as server:
        heard = await failure(server.address)
    assert heard.reason is Reason.CORRUPT
    assert heard.message.startswith("üüü")


@pytest.mark.asyncio
async def test_nobody_there_is_unavailable():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        heard = await failure(f"127.0.0.1:{taken.getsockname()[1]}")
    assert heard.reason is Reason.UNAVAILABLE
    assert heard.entry.retry


@pytest.mark.asyncio
async def test_a_message_beyond_the_limit_is_oversized_and_not_a_lack_of_memory():
    async with Server(echo) as server:
        heard = await failure(server.address, payload=bytes(ch.MAX_MESSAGE_BYTES + 1))
    assert heard.reason is Reason.OVERSIZED


@pytest.mark.asyncio
async def test_an_unknown_method_is_unimplemented():
    async with Server(echo) as server, ch.open_channel(server.address, "x") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Service/Other")(b"", timeout=20)
    assert ch.error_from_rpc(caught.value).reason is Reason.UNIMPLEMENTED


def rpc_error(code, details, metadata=()):
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details=details
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, Reason.UNAVAILABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Reason.UNAVAILABLE),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.OUT_OF_MEMORY_BUDGET),
        (grpc.StatusCode.UNKNOWN, Reason.INTERNAL),
        (grpc.StatusCode.INTERNAL, Reason.UNAVAILABLE),
    ],
)
@pytest.mark.parametrize(
    "metadata", [(), [("grpc-status-details-bin", b"\xff\xff junk")], [("other", "text")]]
)
def test_without_readable_details_the_status_decides(code, reason, metadata):
    heard = ch.error_from_rpc(rpc_error(code, "text", metadata))
    assert (heard.reason, heard.message) == (reason, "text")


def test_a_reason_from_a_newer_peer_is_told_in_words():
    status = ch.to_status(DilocoError(Reason.UNAVAILABLE, "why"))
    ((key, value),) = status.trailing_metadata
    newer = value.replace(b"UNAVAILABLE", b"UNAVAILABLY")
    heard = ch.error_from_rpc(rpc_error(status.code, "why", [(key, newer)]))
    assert heard.reason is Reason.UNAVAILABLE
    assert heard.message == "UNAVAILABLY: why"


def test_error_details_of_another_domain_are_not_ours():
    status = ch.to_status(DilocoError(Reason.FENCED, "why"))
    ((key, value),) = status.trailing_metadata
    foreign = value.replace(b"decoupled-diloco", b"decoupled-diabolo"[:16])
    heard = ch.error_from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, "why", [(key, foreign)]))
    assert heard.reason is Reason.UNAVAILABLE


@pytest.mark.asyncio
async def test_two_channels_have_two_connections_unless_they_agree_to_share():
    async with (
        Server(echo) as server,
        ch.open_channel(server.address, "same") as first,
        ch.open_channel(server.address, "same") as second,
    ):
        for channel in (first, second):
            await channel.unary_unary(METHOD)(b"", timeout=20)
        assert len(server.peers) == 2


@pytest.mark.asyncio
async def test_a_taken_port_is_refused_and_not_shared():
    async with Server(echo) as server:
        other = grpc.aio.server(options=ch.server_options())
        with pytest.raises(UsageError, match=str(server.port)) as caught:
            ch.add_port(other, server.address)
        assert caught.value.reason is Reason.PORT_IN_USE


@pytest.mark.asyncio
async def test_a_channel_or_port_beyond_this_machine_needs_the_word():
    with pytest.raises(UsageError, match="--insecure"):
        ch.open_channel("10.0.0.1:1", "x")
    with pytest.raises(UsageError, match="--insecure"):
        ch.add_port(grpc.aio.server(options=ch.server_options()), "0.0.0.0:0")
    assert ch.add_port(grpc.aio.server(options=ch.server_options()), "0.0.0.0:0", insecure=True)


@pytest.mark.asyncio
async def test_a_client_finds_a_server_that_came_back():
    async with Server(echo) as server:
        port, address = server.port, server.address
    assert (await failure(address)).reason is Reason.UNAVAILABLE
    async with ch.open_channel(address, "control") as channel:
        stub = channel.unary_unary(METHOD)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub(b"", timeout=20)
        server = grpc.aio.server(options=ch.server_options())
        handler = grpc.unary_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", {"Call": handler}),)
        )
        ch.add_port(server, f"127.0.0.1:{port}")
        await server.start()
        assert await stub(b"hello", timeout=60, wait_for_ready=True) == b"hello"
        await server.stop(None)
