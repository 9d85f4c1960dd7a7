"""Pages of other pagestores, over their bulk endpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvpool.client.transfer import PageToRead, PageTransferClients
from kvpool.client.transfer_batches import PageToWrite
from kvpool.core.cancel import CancelToken
from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import InvalidRequest, KvPoolError, SessionBusy
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.outcome import Admission
from kvpool.core.page import PageKey
from kvpool_pagestore.ports import PageWrite, PullItem

_log = logging.getLogger(__name__)


class GrpcPeerPages(PageTransferClients):
    """A ports.PeerPages over the peers' bulk endpoints."""

    def pull(
        self,
        source: RemoteSource,
        spec: KeyspaceSpec,
        items: Sequence[PullItem],
        deadline_s: float,
        on_page: Callable[[int, KvPoolError | None, bool], None],
        stop: CancelToken,
    ) -> None:
        """`deadline_s`: seconds from now. Items of another keyspace than the first one's are refused."""
        pages = [PageToRead(key=item.key, destination=item.destination, on_metadata=item.on_metadata) for item in items]
        if not pages:
            return
        keyspace = pages[0].key.keyspace
        if any(page.key.keyspace != keyspace for page in pages):
            for index in range(len(pages)):
                on_page(index, InvalidRequest("a pull is for pages of one keyspace"), False)
            return
        with self.client(source.bulk_endpoint) as client:
            client.read_pages(
                [(keyspace, spec)],
                pages,
                on_page,
                timeout_s=deadline_s,
                expected_incarnation=source.incarnation,
                stop=stop,
            )

    def verify(self, source: RemoteSource, spec: KeyspaceSpec, keys: Sequence[PageKey], deadline_s: float) -> None:
        """`deadline_s`: seconds from now."""
        try:
            with self.client(source.bulk_endpoint) as client:
                client.verify_pages(
                    [(keys[0].keyspace, spec)], keys, timeout_s=deadline_s, expected_incarnation=source.incarnation
                )
        except KvPoolError as error:
            _log.warning("%s did not verify pages that came corrupt from it: %s", source.bulk_endpoint, error)

    def push(
        self,
        target: RemoteSource,
        spec: KeyspaceSpec,
        items: Sequence[PageWrite],
        deadline_s: float,
        *,
        require_durable: bool,
        on_page: Callable[[int, KvPoolError | None], None],
        stop: CancelToken,
    ) -> None:
        """`deadline_s`: seconds from now. All items are of one keyspace."""
        pages = [PageToWrite(key=item.key, page=item.page, metadata=item.metadata) for item in items]

        def on_written(index: int, admission: Admission, error: KvPoolError | None) -> None:
            if error is None and admission is Admission.PENDING:
                error = SessionBusy("another writer is writing the page there")
            on_page(index, error)

        with self.client(target.bulk_endpoint) as client:
            client.write_pages(
                [(pages[0].key.keyspace, spec)] if pages else [],
                pages,
                on_written,
                timeout_s=deadline_s,
                expected_incarnation=target.incarnation,
                require_durable=require_durable,
                stop=stop,
            )
