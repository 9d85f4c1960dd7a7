"""One HTTP call to an engine's server, with a deadline and bounds. Blocking."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from kvpool_cli.errors import CommandFailed, UsageFailed

_PIECE_BYTES = 64 << 10
_REASON_BYTES_MAX = 4 << 10
_REASON_CHARS_MAX = 300  # of one line


class ServerRefused(CommandFailed):
    """The server answered, with a status that is an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def check_api_key(api_key: str) -> str:
    """Return the key without blanks around it. Raises UsageFailed, without the key, for what no header can carry."""
    key = api_key.strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageFailed("the API key has characters that no HTTP header can carry")
    return key


def fetch(
    url: str, body: Mapping[str, Any] | None = None, *, api_key: str = "", timeout_s: float, size_bytes_max: int
) -> bytes:
    """GET, or POST a JSON body. Raises ServerRefused with the server's own words, else CommandFailed."""
    data = json.dumps(body).encode() if body is not None else None
    deadline_s = time.monotonic() + timeout_s
    try:
        request = Request(url, data=data, headers={"Content-Type": "application/json"})
        if api_key:  # never sent on to where the server redirects
            request.add_unredirected_header("Authorization", f"Bearer {api_key}")
        try:
            with urlopen(request, timeout=timeout_s) as answer:
                found = _read(answer, size_bytes_max, deadline_s)
        except HTTPError as error:
            with error:
                said = _read(error, _REASON_BYTES_MAX, deadline_s).decode(errors="replace")
            if api_key:
                said = said.replace(api_key, "***")
            reason = " ".join(said.split())[:_REASON_CHARS_MAX] or error.reason
            raise ServerRefused(f"{url} answers {error.code}: {reason}", error.code) from None
        if len(found) > size_bytes_max:
            raise ValueError(f"more than {size_bytes_max} bytes")
        return found
    except (HTTPException, OSError, ValueError) as error:
        raise CommandFailed(f"{url} does not answer: {error}") from error


def _read(answer: Any, size_bytes_max: int, deadline_s: float) -> bytes:
    """The body, cut some bytes after `size_bytes_max`."""
    found = bytearray()
    while len(found) <= size_bytes_max and (piece := answer.read1(_PIECE_BYTES)):
        found += piece
        if time.monotonic() > deadline_s:
            raise TimeoutError("its answer does not end in time")
    return bytes(found)
