"""The /metrics endpoint serves the registry it was given and nothing else."""

import socket
import threading
from http.client import HTTPConnection

import pytest
from prometheus_client import CollectorRegistry, Counter

from kvpool import __version__
from kvpool.core.errors import StartupFailed
from kvpool_server.metrics import new_registry, start_metrics_server
from tests.fixtures.patience import PATIENCE_S


def get(port: int, path: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_serves_the_registry_and_the_process() -> None:
    registry = new_registry()
    Counter("kvpool_test_pages_total", "Pages.", registry=registry).inc(3)
    port, stop = start_metrics_server("127.0.0.1", 0, registry)
    try:
        status, text = get(port, "/metrics")
        assert status == 200
        assert "kvpool_test_pages_total 3.0" in text
        assert "process_resident_memory_bytes" in text
        assert 'kvpool_process_resident_bytes{kind="anon"}' in text
        assert f'kvpool_process_info{{version="{__version__}"}} 1.0' in text
        assert get(port, "/etc/passwd")[0] == 404
    finally:
        stop()
    with pytest.raises(ConnectionRefusedError):
        get(port, "/metrics")


@pytest.mark.slow
def test_connections_that_send_nothing_take_a_bounded_number_of_threads() -> None:
    port, stop = start_metrics_server("127.0.0.1", 0, CollectorRegistry())
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) for _ in range(40)]
    try:
        assert silent[-1].recv(1) == b"", "there is no place for it"
        assert threading.active_count() - before <= 16
    finally:
        for each in silent:
            each.close()
        stop()


def test_port_in_use_names_port_and_cure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupFailed, match=rf"127.0.0.1:{port}: it is in use; stop the process"):
            start_metrics_server("127.0.0.1", port, CollectorRegistry())


def test_a_port_that_was_scraped_a_moment_ago_can_be_served_again() -> None:
    port, stop = start_metrics_server("127.0.0.1", 0, CollectorRegistry())
    assert get(port, "/metrics")[0] == 200
    stop()
    again, stop = start_metrics_server("127.0.0.1", port, CollectorRegistry())  # the scrape's end still waits there
    stop()
    assert again == port
