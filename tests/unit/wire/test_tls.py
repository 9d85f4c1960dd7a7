"""Credentials of files that are renewed, damaged or gone: what is used meanwhile, and what is said."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvpool.core.errors import InvalidRequest
from kvpool.wire.tls import TlsCredentials
from kvpool.wire.tls_files import TlsFiles, TlsMaterial, Version, read_files
from tests.fixtures.certificates import Authority, put


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_a_renewal_is_seen_at_the_next_look(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(tmp_path / "own")
    credentials = TlsCredentials(files)
    before = credentials.current()
    assert credentials.channel_credentials() == credentials.channel_credentials()
    authority.issue(tmp_path / "own", days=20)
    after = credentials.current()
    assert (before.generation, after.generation, credentials.channel_credentials()[0]) == (1, 2, 2)
    assert before.validity != after.validity
    assert credentials.current() is after


def test_a_renewal_behind_a_link_is_seen(authority: Authority, tmp_path: Path) -> None:
    """As orchestrators renew: files are links into a directory that is itself a link, which is swapped."""
    for name in ("first", "second"):
        authority.issue(tmp_path / name)
    (tmp_path / "data").symlink_to("first")
    for name in ("ca.crt", "tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(f"data/{name}")
    credentials = TlsCredentials(
        TlsFiles(ca_file=tmp_path / "ca.crt", cert_file=tmp_path / "tls.crt", key_file=tmp_path / "tls.key")
    )
    (tmp_path / "data.new").symlink_to("second")
    (tmp_path / "data.new").replace(tmp_path / "data")
    assert credentials.current().cert_pem == (tmp_path / "second" / "tls.crt").read_bytes()


def test_a_renewal_that_cannot_be_used_is_reported_once_and_left(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue(tmp_path / "own")
    credentials = TlsCredentials(files)
    good = credentials.current()
    assert files.key_file is not None
    put(files.key_file, b"half a renewal")
    assert credentials.current() is good is credentials.current()
    files.key_file.unlink()
    assert credentials.current() is good is credentials.current()
    assert credentials.reload_failure_count == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "tls_key_file" in caplog.text and "stay in use" in caplog.text
    authority.issue(tmp_path / "own")
    assert credentials.current().generation == 2


def test_the_rest_of_a_renewal_that_comes_while_its_half_is_refused_is_seen(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = authority.issue(tmp_path / "own")
    credentials = TlsCredentials(files)
    assert files.cert_file is not None and files.key_file is not None
    renewed = authority.issue(tmp_path / "renewed")
    assert renewed.cert_file is not None and renewed.key_file is not None
    put(files.cert_file, renewed.cert_file.read_bytes())
    key_pem = renewed.key_file.read_bytes()

    def read_then_write_the_rest(paths: TlsFiles, generation: int) -> tuple[Version, TlsMaterial]:
        monkeypatch.undo()
        try:
            return read_files(paths, generation)
        finally:
            put(tmp_path / "own" / "tls.key", key_pem)

    monkeypatch.setattr("kvpool.wire.tls.read_files", read_then_write_the_rest)
    credentials.current()
    assert credentials.current().key_pem == key_pem


def test_files_that_are_written_again_with_the_same_content_are_no_renewal(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Or a copy of three files, of which one is new, would end the long streams of clients twice."""
    files = authority.issue(tmp_path / "own")
    credentials = TlsCredentials(files)
    before = credentials.current()
    caplog.set_level(logging.INFO)
    for _, path in files.named():
        put(path, path.read_bytes())
        assert credentials.current() is before
    assert not caplog.records


def test_files_that_go_away_again_are_reported_again(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue(tmp_path / "own")
    credentials = TlsCredentials(files)
    good = credentials.current()
    for _ in range(2):
        files.ca_file.rename(tmp_path / "elsewhere")
        assert credentials.current() is good
        (tmp_path / "elsewhere").rename(files.ca_file)
        assert credentials.current() is good
    assert credentials.reload_failure_count == len(caplog.records) == 2


@pytest.mark.parametrize(("days_later", "words"), [(11, "expired on"), (-2, "is not valid before")])
def test_dates_that_have_passed_are_reported_once(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture, days_later: int, words: str
) -> None:
    now_s = datetime.now(UTC).timestamp()
    files = authority.issue(tmp_path / "own")
    credentials = TlsCredentials(files, now_s=lambda: now_s)
    assert not caplog.records
    now_s += days_later * 86400
    credentials.current()
    credentials.current()
    reported = [record.getMessage() for record in caplog.records if str(files.cert_file) in record.getMessage()]
    assert len(reported) == 1 and words in reported[0] and "without a restart" in reported[0]


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o604, True)])
def test_a_key_that_everybody_can_read_is_reported(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    files = authority.issue(tmp_path / "own")
    assert files.key_file is not None
    files.key_file.chmod(mode)
    with caplog.at_level(logging.WARNING):
        TlsCredentials(files)
    assert ("chmod 600" in caplog.text) is warned


def test_a_client_without_a_key_cannot_serve(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(tmp_path / "own")
    with pytest.raises(InvalidRequest, match="tls_cert_file and tls_key_file"):
        TlsCredentials(TlsFiles(ca_file=files.ca_file)).server_credentials(require_client_cert=False)
