"""Addresses that other processes hand in."""

from __future__ import annotations

import pytest

from kvpool.core.addresses import check_address, check_endpoint, check_label, check_metrics_url, check_socket_path
from kvpool.core.errors import InvalidRequest


@pytest.mark.parametrize("text", ["host:1", "a-b.c_d:65535", "10.0.0.1:7200", "[::1]:5", "[fe80::1%eth0]:7"])
def test_a_host_and_a_port_is_an_address(text: str) -> None:
    assert check_address(text, "endpoint") == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:0",
        "host:65536",
        "host:12345678",
        "unix:/run/a.sock",
        "unix:1",
        "UNIX:1",
        "dns:8",
        "dns:///evil:53",
        "dns://resolver/evil:53",
        "ipv4:1",
        "xds:1",
        "a b:1",
        "h\x1b[2J:1",
        "user@host:1",
        "h/x:1",
        "a:b:1",
        "x" * 2000 + ":1",
        "h:\u0661",
        "h:1\n",
    ],
)
def test_what_would_be_dialled_otherwise_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^endpoint must"):
        check_address(text, "endpoint")


@pytest.mark.parametrize("text", ["host:1", "unix:/run/a.sock", "unix-abstract:name"])
def test_an_operator_may_name_a_socket(text: str) -> None:
    assert check_endpoint(text, "endpoint") == text


@pytest.mark.parametrize("text", ["host", "unix:", "unix-abstract:", "http://host:1", "/run/a.sock", ""])
def test_another_endpoint_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^endpoint must be host:port .* or unix: and an absolute path"):
        check_endpoint(text, "endpoint")


def test_a_metrics_url_leads_to_metrics_and_nowhere_else() -> None:
    for url in ("http://h:1/metrics", "https://[::1]:5/metrics", "http://h/metrics"):
        assert check_metrics_url(url, "url") == url
    for url in (
        "ftp://h:1/metrics",
        "file:///metrics",
        "http://h:1/admin",
        "http://u@h:1/metrics",
        "http://h:1/metrics?x",
    ):
        with pytest.raises(InvalidRequest):
            check_metrics_url(url, "url")


def test_paths_are_absolute_and_labels_printable() -> None:
    assert check_socket_path("/run/x y", "path") == "/run/x y"
    for path in ("run/x", "unix:/x", "/a\nb"):
        with pytest.raises(InvalidRequest):
            check_socket_path(path, "path")
    assert check_label("host é", "host") == "host é"
    with pytest.raises(InvalidRequest):
        check_label("\x1b]0;x\x07", "host")
