"""Certificates of the prod overlay, with the names that k8s/components/cert-manager asks for, as Secrets."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import yaml

from tests.fixtures.certificates import Authority
from tests.kubernetes.kube import K8S

NAMESPACE = "kvpool"
CERTIFICATE_DAYS = 10.0
PASSWORD = "not-a-secret-of-anybody"  # of a Redis that lives as long as the test
REDIS_NAMES = ("*.redis.kvpool.svc", "*.redis-sentinel.kvpool.svc", "localhost")
_CERTIFICATES = K8S / "components" / "cert-manager" / "certificates.yaml"
_DIRECTORY = "/run/kvpool/redis-tls"
_OPTIONS = "&".join(
    (
        f"ssl_ca_certs={_DIRECTORY}/ca.crt",
        f"ssl_certfile={_DIRECTORY}/tls.crt",
        f"ssl_keyfile={_DIRECTORY}/tls.key",
        f"sentinel_password={PASSWORD}",
    )
)
_SENTINELS = ",".join(f"redis-sentinel-{number}.redis-sentinel.kvpool.svc:26379" for number in range(3))
REDIS_URL = f"rediss+sentinel://:{PASSWORD}@{_SENTINELS}/kvpool/0?{_OPTIONS}"


def names_of_services() -> dict[str, list[str]]:
    """DNS names by Secret, as cert-manager would issue them."""
    found = {}
    for document in yaml.safe_load_all(_CERTIFICATES.read_text()):
        if document["kind"] == "Certificate" and not document["spec"].get("isCA"):
            found[document["spec"]["secretName"]] = document["spec"]["dnsNames"]
    return found


def certificate(
    authority: Authority, directory: Path, name: str, names: list[str], days: float = CERTIFICATE_DAYS
) -> dict[str, Any]:
    """A Secret with a new certificate."""
    files = authority.issue(directory / name, names=names, days=days)
    paths = {"ca.crt": files.ca_file, "tls.crt": files.cert_file, "tls.key": files.key_file}
    assert all(paths.values())
    return secret(name, {key: path.read_bytes() for key, path in paths.items() if path is not None})


def certificates(authority: Authority, directory: Path, days: float = CERTIFICATE_DAYS) -> list[dict[str, Any]]:
    """Those of all services, and of the index as a client of Redis."""
    names = {**names_of_services(), "kvpool-redis-tls": ["kvpool-index"]}
    return [certificate(authority, directory, name, dns_names, days) for name, dns_names in names.items()]


def secrets(authority: Authority, directory: Path) -> list[dict[str, Any]]:
    """The namespace, and all that k8s/README.md says has to be made there first."""
    metadata = {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata},
        *certificates(authority, directory),
        certificate(authority, directory, "kvpool-redis-server-tls", list(REDIS_NAMES)),
        secret("kvpool-redis-password", {"password": PASSWORD.encode()}),
        secret("kvpool-redis", {"url": REDIS_URL.encode()}),
        secret("kvpool-tenant", {"secret": os.urandom(32)}),
    ]


def secret(name: str, data: dict[str, bytes]) -> dict[str, Any]:
    """An opaque one."""
    encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": NAMESPACE}, "data": encoded}
