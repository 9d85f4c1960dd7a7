"""gRPC credentials of files that may be renewed at any time.

Renewals are not announced: each handshake first checks whether the files have changed, which costs a stat
each. What cannot be used (half of a renewal, a key of another certificate) is logged once and the last good state stays
in use.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import grpc

from kvpool.core.errors import InvalidRequest
from kvpool.wire.tls_files import TlsFiles, TlsMaterial, Version, files_version, read_files, readable_by_others

_log = logging.getLogger(__name__)


class TlsCredentials:
    """TLS of one process, for both directions. Thread-safe."""

    def __init__(self, files: TlsFiles, *, server_name: str = "", now_s: Callable[[], float] = time.time) -> None:
        """Reads the files. Raises InvalidRequest if they cannot be used.

        server_name: what certificates of servers must be issued to, instead of the host that is connected to: every
        certificate of that name then passes for every server.
        """
        self.files = files
        self.server_name = server_name
        self.reload_failure_count = 0
        self._now_s = now_s
        self._lock = threading.Lock()
        self._version, self._material = read_files(files, 1)
        self._refused: Version | str | None = None  # which state of the files has been complained about
        self._logged: set[tuple[int, Path]] = set()
        self._channel: tuple[int, grpc.ChannelCredentials] | None = None
        self._warn_of_open_key()
        self._tell_of_dates()

    @property
    def generation(self) -> int:
        """Of the files as they are now; see TlsMaterial."""
        return self.current().generation

    def current(self) -> TlsMaterial:
        """What the files hold now, or held when they could last be used."""
        with self._lock:
            self._look()
            self._tell_of_dates()
            return self._material

    def channel_credentials(self) -> tuple[int, grpc.ChannelCredentials]:
        """For channels made from now on, and the generation that they are of."""
        material = self.current()
        with self._lock:
            if self._channel is None or self._channel[0] < material.generation:
                made = grpc.ssl_channel_credentials(material.ca_pem, material.key_pem, material.cert_pem)
                self._channel = (material.generation, made)
            return self._channel

    def channel_options(self) -> list[tuple[str, str]]:
        """Options of channels that use these credentials."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []

    def server_credentials(self, *, require_client_cert: bool) -> grpc.ServerCredentials:
        """For one server. Each handshake uses the files as they are then. Raises InvalidRequest without a key."""
        served = self.current()
        configuration = _server_configuration(served, require_client_cert)
        served_generation = served.generation

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served_generation
            material = self.current()
            if material.generation == served_generation:
                return None
            served_generation = material.generation
            return _server_configuration(material, require_client_cert)

        # None means no change, though the stubs do not know it.
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", renewed)
        return grpc.dynamic_ssl_server_credentials(
            configuration, fetch, require_client_authentication=require_client_cert
        )

    def _look(self) -> None:
        try:
            version = files_version(self.files)
        except InvalidRequest as error:
            self._complain(error.message, error)
            return
        if version == self._version:
            self._refused = None
            return
        if version == self._refused:
            return
        try:
            self._version, found = read_files(self.files, self._material.generation + 1)
        except InvalidRequest as error:
            # Of the state that was read: the rest of a renewal may have come since.
            self._complain(version, error)
            return
        self._refused = None
        if replace(found, generation=self._material.generation) == self._material:
            return  # rewritten with equal content: connections stay
        self._material = found
        _log.info("%s and what belongs to it were renewed and are in use", self._subject)
        self._warn_of_open_key()

    def _complain(self, state: Version | str, error: InvalidRequest) -> None:
        if state == self._refused:
            return
        self._refused = state
        self.reload_failure_count += 1
        _log.warning("the renewed TLS files are not used, the last ones stay in use: %s", error.message)

    @property
    def _subject(self) -> Path:
        return self.files.cert_file or self.files.ca_file

    def _warn_of_open_key(self) -> None:
        key = self.files.key_file
        try:
            if key is not None and readable_by_others(key):
                _log.warning("tls_key_file %s can be read by every user of this host; chmod 600 it, or 640", key)
        except OSError as error:  # it was there a moment ago; the next look says more
            _log.debug("tls_key_file %s went away: %s", key, error)

    def _tell_of_dates(self) -> None:
        """Say once of each certificate that it is not valid now: peers refuse it without saying so here."""
        now_s = self._now_s()
        for what, path, validity in (
            ("the certificate in", self.files.cert_file, self._material.validity),
            ("a CA in", self.files.ca_file, self._material.ca_validity),
        ):
            if path is None or validity is None or validity.not_before_s <= now_s <= validity.not_after_s:
                continue
            change = (self._material.generation, path)
            if change in self._logged:
                continue
            self._logged.add(change)
            late = now_s > validity.not_after_s
            at_s = validity.not_after_s if late else validity.not_before_s
            _log.error(
                "%s %s %s %s: connections that depend on it fail; put a renewed one in its place, without a restart",
                what,
                path,
                "expired on" if late else "is not valid before",
                datetime.fromtimestamp(at_s, UTC).isoformat(),
            )


def _server_configuration(material: TlsMaterial, require_client_cert: bool) -> grpc.ServerCertificateConfiguration:
    if material.key_pem is None or material.cert_pem is None:
        raise InvalidRequest("a server needs a certificate: set tls_cert_file and tls_key_file")
    return grpc.ssl_server_certificate_configuration(
        [(material.key_pem, material.cert_pem)], material.ca_pem if require_client_cert else None
    )
