"""TLS of a client: from values, or from the environment, where engines and commands find it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvpool.core.errors import InvalidRequest
from kvpool.wire.tls import TlsCredentials
from kvpool.wire.tls_files import TlsFiles

__all__ = ["TLS_VARIABLES", "TlsCredentials", "TlsFiles", "tls_from_environment", "tls_from_settings"]

TLS_VARIABLES: Final[Mapping[str, str]] = {
    "tls_ca_file": "KVPOOL_TLS_CA_FILE",
    "tls_cert_file": "KVPOOL_TLS_CERT_FILE",
    "tls_key_file": "KVPOOL_TLS_KEY_FILE",
    "tls_server_name": "KVPOOL_TLS_SERVER_NAME",
}
"""Setting and variable: tls_ca_file switches TLS on; certificate and key are for servers that demand them."""


def tls_from_settings(settings: Mapping[str, str]) -> TlsCredentials | None:
    """By the names of TLS_VARIABLES; missing and empty are the same, and None is plain. Raises InvalidRequest."""
    given = {name: settings.get(name, "") for name in TLS_VARIABLES}
    if not given["tls_ca_file"]:
        pointless = [name for name, value in given.items() if value]
        if pointless:
            raise InvalidRequest(f"{', '.join(pointless)} without tls_ca_file: name the CA bundle of the servers too")
        return None
    files = TlsFiles(
        ca_file=Path(given["tls_ca_file"]),
        cert_file=Path(given["tls_cert_file"]) if given["tls_cert_file"] else None,
        key_file=Path(given["tls_key_file"]) if given["tls_key_file"] else None,
    )
    return TlsCredentials(files, server_name=given["tls_server_name"])


def tls_from_environment(
    environment: Mapping[str, str], settings: Mapping[str, str] | None = None
) -> TlsCredentials | None:
    """By the variables of TLS_VARIABLES; a setting that is given and not empty comes first. Raises InvalidRequest."""
    return tls_from_settings(
        {
            name: (settings or {}).get(name, "") or environment.get(variable, "")
            for name, variable in TLS_VARIABLES.items()
        }
    )
