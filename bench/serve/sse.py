"""Server-sent events, as far as streamed completions use them."""

from __future__ import annotations

from collections.abc import Iterator

LINE_BYTES_MAX = 4 << 20


class StreamBroken(ValueError):
    """What came is no event stream; the message says why."""


class EventReader:
    """Bytes in, data of events out. Holds one unfinished line and one unfinished event, each bounded."""

    __slots__ = ("_data", "_data_bytes", "_line")

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[str] = []
        self._data_bytes = 0

    def feed(self, received: bytes) -> Iterator[str]:
        """The data of every event that these bytes complete. Raises StreamBroken."""
        *lines, rest = received.split(b"\n")
        for line in lines:
            self._line += line
            self._bound(len(self._line))
            text = self._take_line()
            if text:
                self._field(text)
            elif self._data:
                yield "\n".join(self._data)
                self._data, self._data_bytes = [], 0
        self._line += rest
        self._bound(len(self._line))

    @property
    def unfinished(self) -> bool:
        """Whether an event has begun that is not complete."""
        return bool(self._line or self._data)

    def _take_line(self) -> str:
        try:
            text = self._line.decode()
        except UnicodeDecodeError as error:
            raise StreamBroken(f"a line is no UTF-8: {error.reason}") from error
        self._line.clear()
        return text.removesuffix("\r")

    def _field(self, line: str) -> None:
        """Comments (": ping") and other fields than data say nothing to us."""
        name, separator, value = line.partition(":")
        if name not in ("data", "event", "id", "retry", ""):
            raise StreamBroken(f"a line is no field of an event: {line[:60]!r}")
        if name == "data" and separator:
            self._data.append(value.removeprefix(" "))
            self._data_bytes += len(line)
            self._bound(self._data_bytes)

    def _bound(self, size_bytes: int) -> None:
        if size_bytes > LINE_BYTES_MAX:
            raise StreamBroken(f"an event is longer than {LINE_BYTES_MAX >> 20} MiB")
