"""What Prometheus scrapes of a learner agrees with what the learner says of itself."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import socket
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
import torch
from learner_kit import NAME, make_model, make_settings
from prometheus_client.parser import text_string_to_metric_families
from served_synchronizer import served

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.metrics import BUILD_INFO, Kind
from learner_client import Learner, serve_metrics
from learner_client.exchange import Exchange
from learner_client.metrics import TABLE, LearnerCollector
from learner_client.overhead import OverheadMeter
from learner_client.settings import LearnerSettings
from learner_client.tally import OfflineTime
from learner_client.train.corpus import write_corpus
from learner_client.train.loop import train
from learner_client.train.settings import TrainSettings
from learner_client.train.stopping import StopRequest
from learner_client.train.tokenizer import build_tokenizer


class Scrape:
    """One scrape over HTTP: ``scrape("step")`` is a value, None where there is none."""

    def __init__(self, port: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as response:
            body = response.read().decode()
        self.families = list(text_string_to_metric_families(body))
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._values.get(
            (f"diloco_learner_{name}", frozenset({("learner", NAME), *labels.items()}))
        )


def test_names_follow_the_rules_and_belong_to_learners_alone():
    for spec in TABLE:
        assert spec is BUILD_INFO or re.fullmatch(r"diloco_learner(_[a-z]+)+", spec.name)
        assert spec.name.endswith("_total") == (spec.kind is Kind.COUNTER), spec.name
        assert spec.text.endswith("."), spec.name
    assert len({spec.name for spec in TABLE}) == len(TABLE)


def test_a_learner_that_has_not_joined_is_scraped_too():
    collector = LearnerCollector(NAME, Exchange(NAME), OverheadMeter())
    with serve_metrics("127.0.0.1:0", collector) as port:
        scrape = Scrape(port)
    assert scrape("state", state="joining") == 1
    assert scrape("online") == scrape("steps_total") == scrape("offline_seconds_total") == 0
    assert scrape("loss") is None
    known = {spec.name.removesuffix("_total") for spec in TABLE}
    ours = {family.name for family in scrape.families if family.name.startswith("diloco_")}
    assert ours == known


def test_values_are_those_that_the_learner_has_while_it_trains():
    with served() as running:
        service = running.service
        with (
            Learner(make_model(), address=running.address, learner_id=NAME) as learner,
            serve_metrics("127.0.0.1:0", learner.metrics) as port,
        ):
            for loss in (3.0, 2.5):
                learner.step(num_tokens=32, loss=loss)
            size = learner._exchange.layout.fragments[1].num_elements
            running.do(lambda: service.publish(1, 1, torch.randn(size)))
            running.wait(lambda: learner.status.num_updates == 4)
            learner.step(num_tokens=32)
            running.wait(lambda: len(service.steps) >= 1)
            running.do(lambda: service.pull(NAME, 2, 2))
            running.wait(lambda: service.pushes and learner.status.pushes)
            scrape, status, overhead = Scrape(port), learner.status, learner.overhead
    assert scrape("state", state="training") == scrape("online") == 1
    assert scrape("step") == status.local_step == 3
    assert scrape("steps_total") == overhead.num_steps == 3
    assert scrape("global_step") == status.global_step == 1
    assert scrape("tokens_total") == 96
    assert scrape("loss") == 2.5
    assert scrape("term") == status.term == 1
    assert scrape("updates_total") == scrape("updates_applied_total") == 4
    assert scrape("pushes_total", reason="ACCEPTED") == 1
    assert scrape("transfer_bytes_total", leg="push") == status.bytes_up > 0
    assert scrape("transfer_bytes_total", leg="update") == status.bytes_down > 0
    share = scrape("overhead_seconds_total") / scrape("loop_seconds_total")
    assert share == pytest.approx(overhead.share)
    assert scrape("sync_wait_seconds_total", reason="join") > 0
    assert scrape("sync_wait_seconds_total", reason="data") == 0
    assert scrape("network_calls_total") > 0
    assert scrape("training_thread_calls_total") == 0


def test_time_without_the_synchronizer_is_counted_and_ends_with_it():
    with (
        served() as running,
        Learner(make_model(), address=running.address, learner_id=NAME) as learner,
        serve_metrics("127.0.0.1:0", learner.metrics) as port,
    ):
        assert Scrape(port)("offline_seconds_total") == 0
        running.away()
        running.wait(lambda: not learner.status.online)
        first = Scrape(port)
        assert first("online") == 0
        running.wait(lambda: Scrape(port)("offline_seconds_total") > 0.05)
        running.back()
        running.wait(lambda: learner.status.online)
        back = Scrape(port)
        assert back("online") == 1
        assert back("offline_seconds_total") > first("offline_seconds_total")
        learner.step(num_tokens=1)
        assert Scrape(port)("offline_seconds_total") == back("offline_seconds_total")


def test_nothing_is_served_unless_an_address_is_given():
    with serve_metrics(None, LearnerCollector(NAME, Exchange(NAME), OverheadMeter())) as port:
        assert port is None
    assert LearnerSettings().metrics_address is None


def test_a_wait_for_data_is_counted_while_it_lasts():
    exchange, stop = Exchange(NAME), threading.Event()
    exchange.data.begin(make_settings(data_mode="leases", data_length=20, data_lease_length=4))
    collector = LearnerCollector(NAME, exchange, OverheadMeter())
    thread = threading.Thread(target=lambda: exchange.data.batch(1, give_up=stop.is_set))
    with serve_metrics("127.0.0.1:0", collector) as port:
        thread.start()
        try:
            seen = [0.0]
            deadline = time.monotonic() + 20
            while len(set(seen)) < 4 and time.monotonic() < deadline:
                seen.append(Scrape(port)("sync_wait_seconds_total", reason="data"))
        finally:
            stop.set()
            thread.join()
        assert len(set(seen)) == 4, "it goes up, and nothing has come"
        assert seen == sorted(seen)
        assert Scrape(port)("sync_wait_seconds_total", reason="data") >= seen[-1]


def test_time_without_the_synchronizer_never_goes_back_while_another_thread_reads_it(request):
    before = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(before))
    sys.setswitchinterval(1e-6)
    offline, stop = OfflineTime(), threading.Event()

    def tell():
        while not stop.is_set():
            offline.heed(online=True)
            offline.heed(online=False)

    thread = threading.Thread(target=tell)
    thread.start()
    highest = 0.0
    try:
        for _ in range(200_000):
            seconds = offline.seconds
            assert seconds >= highest
            highest = seconds
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", "127.0.0.1"])
def test_what_is_no_address_is_refused_before_anything_starts(address):
    with pytest.raises(UsageError) as caught:
        LearnerSettings(metrics_address=address)
    assert caught.value.reason is Reason.CONFIG_INVALID


def test_what_others_could_read_is_served_only_where_that_is_said_aloud():
    collector = LearnerCollector(NAME, Exchange(NAME), OverheadMeter())
    with pytest.raises(UsageError, match="--insecure"), serve_metrics("0.0.0.0:0", collector):
        pass
    with serve_metrics("0.0.0.0:0", collector, insecure=True) as port:
        assert Scrape(port)("online") == 0


def test_a_port_that_is_taken_is_refused_with_what_to_do():
    collector = LearnerCollector(NAME, Exchange(NAME), OverheadMeter())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(UsageError, match="choose another one") as caught,
            serve_metrics(address, collector),
        ):
            pass
    assert caught.value.reason is Reason.PORT_IN_USE


def test_who_only_holds_connections_takes_few_threads_and_gives_way():
    collector = LearnerCollector(NAME, Exchange(NAME), OverheadMeter())
    num_before = threading.active_count()
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(serve_metrics("127.0.0.1:0", collector))
        for _ in range(30):
            held = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            held.sendall(b"GET /metrics HTTP/1.1\r\nHost: local")
        scrape, deadline = None, time.monotonic() + 20
        while scrape is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                scrape = Scrape(port)
            assert threading.active_count() - num_before <= 1 + 16
        assert scrape is not None
        assert scrape("online") == 0


def test_who_connects_again_and_again_keeps_nobody_from_scraping():
    collector = LearnerCollector(NAME, Exchange(NAME), OverheadMeter())
    over = threading.Event()

    def hold(port):
        while not over.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 0.5) as held,
            ):
                held.sendall(b"GET /metrics HTTP/1.1\r\n")
                held.recv(1)

    with serve_metrics("127.0.0.1:0", collector) as port:
        holders = [threading.Thread(target=hold, args=(port,)) for _ in range(8)]
        try:
            for holder in holders:
                holder.start()
            num_scraped = 0
            for _ in range(20):
                with contextlib.suppress(OSError):
                    num_scraped += Scrape(port)("online") == 0
        finally:
            over.set()
            for holder in holders:
                holder.join()
    assert num_scraped >= 10


@pytest.mark.parametrize("host", ["metrics.example", "localhost.example:80", ""])
def test_a_name_from_elsewhere_that_leads_here_is_refused(host):
    collector = LearnerCollector(NAME, Exchange(NAME), OverheadMeter())
    with serve_metrics("127.0.0.1:0", collector) as port:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Host": host})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=20)
        caught.value.close()
        assert caught.value.code == 421
        Scrape(port)


def test_who_says_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr("learner_client.metrics._Handler.timeout", 0.05)
    collector = LearnerCollector(NAME, Exchange(NAME), OverheadMeter())
    with (
        serve_metrics("127.0.0.1:0", collector) as port,
        socket.create_connection(("127.0.0.1", port), 20) as silent,
    ):
        assert silent.recv(1) == b"", "the other side ends it"


def test_what_is_wrong_with_a_request_is_not_said_on_the_terminal(capfd):
    collector = LearnerCollector(NAME, Exchange(NAME), OverheadMeter())
    with serve_metrics("[::1]:0" if socket.has_ipv6 else "127.0.0.1:0", collector) as port:
        host = "::1" if socket.has_ipv6 else "127.0.0.1"
        for said in (b"\x16\x03\x01\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"GET " + b"x" * 99_999):
            with socket.create_connection((host, port), 20) as wrong:
                wrong.sendall(said)
                wrong.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    while wrong.recv(4096):
                        pass
    assert "".join(capfd.readouterr()) == ""


def test_the_trainer_serves_its_metrics_while_it_trains(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="learner_client")
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten. " * 400)
    write_corpus([str(text)], tmp_path / "data", build_tokenizer("bytes"), sequence_length=16)
    trainer = TrainSettings(batch_size=1, sequence_length=16, num_shards=1)
    settings = LearnerSettings(
        learner_id=NAME, run_dir=tmp_path, metrics_address="127.0.0.1:0", pace=0.02, device="cpu"
    )
    stop = StopRequest()
    with served(num_learners=1, trainer_json=trainer.to_json()) as running:
        settings = dataclasses.replace(settings, address=running.address)
        thread = threading.Thread(target=lambda: train(settings, stop))
        thread.start()
        try:
            found = re.compile(r"metrics on http://127\.0\.0\.1:(\d+)/metrics")
            running.wait(lambda: found.search(caplog.text))
            port = int(found.search(caplog.text)[1])
            running.wait(lambda: (Scrape(port)("steps_total") or 0) >= 2)
            scrape = Scrape(port)
        finally:
            stop.set()
            thread.join(20)
    assert scrape("training_thread_calls_total") == 0
    # A step may be between its report and its end.
    assert scrape("tokens_total") / 16 - scrape("steps_total") in {0, 1}
    assert scrape("loss") > 0
    with pytest.raises(urllib.error.URLError):
        Scrape(port)
