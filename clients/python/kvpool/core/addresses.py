"""The form of addresses that come from other processes: a peer, or a record in Redis, must not choose a resolver.

What an operator configures may also be "unix:/path"; what a node registers may not: gRPC would dial a socket of the
reader's host, and "dns:", "xds:" and the like would ask servers that the sender names.
"""

from __future__ import annotations

import re
from typing import Final

from kvpool.core.cluster import NodeInfo
from kvpool.core.errors import InvalidRequest

_CHARACTERS_MAX: Final = 1024
_HOST_PORT: Final = re.compile(
    r"(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]):(?P<port>[0-9]{1,5})"
)
# gRPC reads "dns:1" as a scheme and its path.
_SCHEMES: Final = frozenset(
    ("dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds", "google-c2p", "http", "https", "passthrough")
)
_METRICS_URL: Final = re.compile(r"https?://(?P<address>[^/?#@]+)/metrics")


def check_address(text: str, name: str) -> str:
    """`text`, if it is host:port with a name or an address as host. Raises InvalidRequest naming the field."""
    found = _HOST_PORT.fullmatch(text) if len(text) <= _CHARACTERS_MAX else None
    if found is None or not 0 < int(found["port"]) < 65536 or found["host"].lower() in _SCHEMES:
        raise InvalidRequest(f"{name} must be host:port with a port of 1 to 65535, got {text[:80]!r}")
    return text


def check_endpoint(text: str, name: str) -> str:
    """`text`, if it is what an operator may configure: host:port or "unix:/path". Raises InvalidRequest naming it."""
    if text.startswith("unix:/") or (text.startswith("unix-abstract:") and text != "unix-abstract:"):
        return text
    try:
        return check_address(text, name)
    except InvalidRequest:
        raise InvalidRequest(
            f"{name} must be host:port with a port of 1 to 65535, or unix: and an absolute path, got {text[:80]!r}"
        ) from None


def check_metrics_url(text: str, name: str) -> str:
    """`text`, if it is http(s)://host[:port]/metrics. Raises InvalidRequest naming the field."""
    found = _METRICS_URL.fullmatch(text) if len(text) <= _CHARACTERS_MAX else None
    if found is None:
        raise InvalidRequest(f"{name} must be http://host:port/metrics, got {text[:80]!r}")
    address = found["address"]
    check_address(address if re.search(r":[0-9]+$", address) else f"{address}:80", name)
    return text


def check_socket_path(text: str, name: str) -> str:
    """`text`, if it is an absolute path that can be printed. Raises InvalidRequest naming the field."""
    if not text.startswith("/") or len(text) > _CHARACTERS_MAX or not text.isprintable():
        raise InvalidRequest(f"{name} must be an absolute path, got {text[:80]!r}")
    return text


def check_label(text: str, name: str) -> str:
    """`text`, if it is short and has no control characters. Raises InvalidRequest naming the field."""
    if len(text) > _CHARACTERS_MAX or not text.isprintable():
        raise InvalidRequest(f"{name} must be at most {_CHARACTERS_MAX} printable characters, got {text[:80]!r}")
    return text


def check_node_addresses(node: NodeInfo) -> NodeInfo:
    """`node`, if its addresses have these forms. Raises InvalidRequest naming the field."""
    check_label(node.host_id, "node.host_id")
    for name in ("endpoint", "bulk_endpoint"):
        if address := getattr(node, name):
            check_address(address, f"node.{name}")
    if node.local_socket:
        check_socket_path(node.local_socket, "node.local_socket")
    if node.metrics_url:
        check_metrics_url(node.metrics_url, "node.metrics_url")
    return node


def peer_host(peer: str) -> str:
    """Whose calls count together: the address of gRPC's peer without its port. All of a unix socket are one host."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer.partition(":")[0]
