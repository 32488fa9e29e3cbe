"""What Prometheus scrapes of a learner: read off what it knows of itself when somebody asks.

``learner.metrics`` is a collector: register it where your process exports its own metrics, or let
``serve_metrics`` serve it. Nothing of it runs in the training thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import socketserver
import threading
import time
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from decoupled_diloco.channel import (
    Address,
    is_local_name,
    is_loopback,
    not_bound,
    parse_address,
    require_secure,
)
from decoupled_diloco.metrics import BUILD_INFO, MetricSpec, Sheet, counter, gauge
from learner_client.core.connection import State
from learner_client.exchange import Exchange
from learner_client.overhead import OverheadMeter
from learner_client.status import status_of
from learner_client.transport.calls import num_calls

_LOG = logging.getLogger("learner_client")

_MOST_AT_ONCE: Final = 8
_MOST_THREADS: Final = 16
"""More than that is only for a moment: they are about to end."""
_SILENT_S: Final = 5.0
_REQUEST_S: Final = 10.0
"""How long a request may take with its answer, where another one wants its place."""

TABLE: Final[tuple[MetricSpec, ...]] = (
    BUILD_INFO,
    gauge("diloco_learner_state", "1 for what it does now, 0 for the rest.", "state"),
    gauge("diloco_learner_online", "1 while the synchronizer answers it."),
    counter("diloco_learner_offline_seconds_total", "Time without; it trains on meanwhile."),
    gauge("diloco_learner_term", "Term of the synchronizer that it follows."),
    gauge("diloco_learner_global_step", "Global step of the newest update in its model."),
    gauge("diloco_learner_step", "Local step: inner steps over all lives of its id."),
    counter("diloco_learner_steps_total", "Inner steps of this process."),
    counter("diloco_learner_tokens_total", "Tokens that they trained on."),
    gauge("diloco_learner_loss", "Training loss of the newest, nats/token."),
    counter("diloco_learner_loop_seconds_total", "Time of the training loop, steps and all."),
    counter(
        "diloco_learner_overhead_seconds_total",
        "Time of it inside learner.step: what taking part costs beside the user's own step.",
    ),
    counter(
        "diloco_learner_sync_wait_seconds_total",
        "Time that training waited for the synchronizer: join (the first parameters) and data "
        "(leases that came late); never within a step.",
        "reason",
    ),
    counter("diloco_learner_network_calls_total", "Network calls of the process."),
    counter(
        "diloco_learner_training_thread_calls_total",
        "Network calls of the training thread: 0, but where the loop runs in the event loop.",
    ),
    counter("diloco_learner_updates_total", "Updates received and verified."),
    counter("diloco_learner_updates_applied_total", "Updates written into the model."),
    counter(
        "diloco_learner_digest_mismatches_total", "Updates refused because their digest differed."
    ),
    counter(
        "diloco_learner_pushes_total", "Answers to its pushes: ACCEPTED, or why not.", "reason"
    ),
    counter("diloco_learner_declined_total", "Pulls that it declined, by reason.", "reason"),
    counter("diloco_learner_transfer_bytes_total", "Payload bytes: pushes, updates.", "leg"),
)


class LearnerCollector(Collector):
    """Reads one learner; its series carry the label ``learner``.

    Args:
        learner_id: the learner.
        exchange: what its threads share.
        meter: its time inside ``learner.step``.
    """

    def __init__(self, learner_id: str, exchange: Exchange, meter: OverheadMeter) -> None:
        self._learner_id = learner_id
        self._exchange = exchange
        self._meter = meter

    def describe(self) -> Iterable[Metric]:
        """Names and types, without values."""
        return self._sheet().families()

    def collect(self) -> Iterable[Metric]:
        """All metrics as of now."""
        sheet = self._sheet()
        sheet.build_info("learner")
        exchange, meter = self._exchange, self._meter
        status, tally = status_of(exchange, ""), exchange.tally
        for state in State:
            sheet.put("diloco_learner_state", state is status.state, state=str(state))
        sheet.put("diloco_learner_online", status.online)
        sheet.put("diloco_learner_offline_seconds_total", tally.offline.seconds)
        sheet.put("diloco_learner_term", status.term)
        sheet.put("diloco_learner_global_step", status.global_step)
        sheet.put("diloco_learner_step", status.local_step)
        sheet.put("diloco_learner_steps_total", meter.num_steps)
        sheet.put("diloco_learner_tokens_total", tally.num_tokens)
        if tally.loss is not None and math.isfinite(tally.loss):
            sheet.put("diloco_learner_loss", tally.loss)
        sheet.put("diloco_learner_loop_seconds_total", meter.loop_s)
        sheet.put("diloco_learner_overhead_seconds_total", meter.inside_s)
        for reason, seconds in (("join", meter.join_s), ("data", exchange.data.status.wait_s)):
            sheet.put("diloco_learner_sync_wait_seconds_total", seconds, reason=reason)
        sheet.put("diloco_learner_network_calls_total", num_calls())
        sheet.put("diloco_learner_training_thread_calls_total", meter.num_calls)
        sheet.put("diloco_learner_updates_total", status.num_updates)
        sheet.put("diloco_learner_updates_applied_total", tally.num_applied)
        sheet.put("diloco_learner_digest_mismatches_total", status.num_digest_mismatches)
        for reason, number in status.pushes.items():
            sheet.put("diloco_learner_pushes_total", number, reason=reason)
        for reason, number in status.declined.items():
            sheet.put("diloco_learner_declined_total", number, reason=reason)
        for leg, num_bytes in (("push", status.bytes_up), ("update", status.bytes_down)):
            sheet.put("diloco_learner_transfer_bytes_total", num_bytes, leg=leg)
        return sheet.families()

    def _sheet(self) -> Sheet:
        return Sheet(TABLE, learner=self._learner_id)


@contextlib.contextmanager
def serve_metrics(
    address: str | None, collector: Collector, *, insecure: bool = False
) -> Iterator[int | None]:
    """Serves metrics over HTTP for as long as the context lasts, in a thread of its own.

    Beside the collector's: memory, time and files of the process.

    Args:
        address: ``host:port``, port 0 for a free one; None serves nothing.
        collector: what is served.
        insecure: True where others than this machine may read it.

    Yields:
        The port.

    Raises:
        UsageError: CONFIG_INVALID for what is no address, CONFIG_CONFLICT for one beyond this
            machine that was not asked for, PORT_IN_USE where it cannot be had.
    """
    if address is None:
        yield None
        return
    target = parse_address(address)
    require_secure(target, insecure=insecure)
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    try:
        server = _Server(target)
    except OSError as error:
        raise not_bound(target) from error
    server.set_app(make_wsgi_app(registry))
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    _LOG.info("metrics on http://%s/metrics", Address(target.host, server.server_port))
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


_Request = socket.socket | tuple[bytes, socket.socket]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """Answers scrapes in threads, few at a time: they take memory and time from training.

    Args:
        address: where it listens; port 0 takes any.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: Address) -> None:
        self.is_local = is_loopback(address)
        self._open: dict[_Request, float] = {}
        self._asked: set[_Request] = set()
        self._late: set[_Request] = set()
        self._lock = threading.Lock()
        self.address_family, *_, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        super().__init__((str(where[0]), address.port), _Handler)

    def server_bind(self) -> None:
        """Takes the port, without a look for the name of this machine, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.socket.getsockname()[1]
        self.setup_environ()

    def process_request(self, request: _Request, client_address: object) -> None:
        """Begins to answer; where few are answered, whoever only holds a connection makes room."""
        with self._lock:
            if len(self._open) - len(self._late) >= _MOST_AT_ONCE:
                self._make_room(time.monotonic())
            is_full = (
                len(self._open) - len(self._late) >= _MOST_AT_ONCE
                or len(self._open) >= _MOST_THREADS
            )
            if not is_full:
                self._open[request] = time.monotonic()
        if is_full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def _make_room(self, now: float) -> None:
        """Cuts off the oldest of those that have not asked for anything, or take too long."""
        for late, begun in self._open.items():
            waits = late not in self._asked or now - begun > _REQUEST_S
            if waits and late not in self._late and isinstance(late, socket.socket):
                self._late.add(late)
                with contextlib.suppress(OSError):
                    late.shutdown(socket.SHUT_RDWR)
                return

    def asked(self, request: _Request) -> None:
        """Somebody has said what is wanted."""
        with self._lock:
            self._asked.add(request)

    def shutdown_request(self, request: _Request) -> None:
        """A request is over."""
        with self._lock:
            self._open.pop(request, None)
            self._asked.discard(request)
            self._late.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: _Request, client_address: object) -> None:
        """Whoever goes away meanwhile is no news."""
        _LOG.debug("metrics: a request failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_S
    server: _Server

    def parse_request(self) -> bool:
        """Refuses who asks by a name from elsewhere: no web page reads it that way."""
        if not super().parse_request():
            return False
        self.server.asked(self.connection)
        if self.server.is_local and not is_local_name(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "ask for it as localhost or 127.0.0.1")
            return False
        return True

    def log_message(self, format: str, *args: object) -> None:
        """A scrape is no news."""
