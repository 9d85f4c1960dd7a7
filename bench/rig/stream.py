"""Pages to and from a pagestore by page streams, as a process without an arena of its own does."""

from __future__ import annotations

from bench.rig.engine import SPEC
from bench.rig.machine import rate, shared_bytes
from bench.rig.session import METADATA, PAGE_BYTES, PAYLOAD_BYTES
from kvpool.client.transfer import PageToRead, PageToWrite, PageTransferClient
from kvpool.core.errors import KvPoolError
from kvpool.core.outcome import Admission
from kvpool.core.page import HEADER_BYTES, PageKey, seal, verify
from kvpool_cli.errors import CommandFailed

FRAME_BYTES = 1 << 20
_TIMEOUT_S = 60.0


class BenchTransfer:
    """Page buffers of this process, and a client of the pagestore's bulk endpoint."""

    def __init__(self, bulk_endpoint: str, keyspace: bytes, page_count: int) -> None:
        self._client = PageTransferClient(bulk_endpoint, frame_bytes=FRAME_BYTES)
        self._keyspaces = [(keyspace, SPEC)]
        self.size_bytes = PAGE_BYTES * page_count
        memory = shared_bytes(self.size_bytes).data
        self._pages = [memory[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] for at in range(page_count)]

    def write_rate(self, keys: list[PageKey]) -> float:
        """GB/s of writing pages until they are visible there, verified; sealing them is not counted."""
        items = []
        for number, (key, page) in enumerate(zip(keys, self._pages, strict=True)):
            page[HEADER_BYTES : HEADER_BYTES + 8] = number.to_bytes(8, "little")
            seal(page, key, SPEC.codec, PAYLOAD_BYTES)
            items.append(PageToWrite(key=key, page=page, metadata=METADATA))
        failed: list[object] = []

        def on_page(number: int, admission: Admission, error: KvPoolError | None) -> None:
            if admission is not Admission.RESERVED:
                failed.append(error or admission.name)

        result = rate(
            self.size_bytes,
            lambda: self._client.write_pages(self._keyspaces, items, on_page, timeout_s=_TIMEOUT_S),
        )
        if failed:
            raise CommandFailed(f"{len(failed)} pages were not written: {failed[0]}")
        return result

    def read_rate(self, keys: list[PageKey], *, verified: bool) -> float:
        """GB/s of reading pages into the buffers, and of verifying them too if asked for."""
        items = [PageToRead(key=key, destination=page) for key, page in zip(keys, self._pages, strict=True)]
        failed: list[object] = []

        def on_page(number: int, error: KvPoolError | None, hit: bool) -> None:
            fault = verify(self._pages[number], keys[number], SPEC.codec) if hit and verified else None
            if not hit or fault is not None:
                failed.append(error or fault or "it was missed")

        result = rate(
            self.size_bytes,
            lambda: self._client.read_pages(self._keyspaces, items, on_page, timeout_s=_TIMEOUT_S),
        )
        if failed:
            raise CommandFailed(f"{len(failed)} pages were not read: {failed[0]}")
        return result

    def close(self) -> None:
        """End the connection."""
        self._client.close()
