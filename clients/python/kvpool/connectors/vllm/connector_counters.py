"""What an engine counts of its use of the pool since it was last asked."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvpool.connectors.vllm.orders import LoadEnd, StoreEnd


@dataclass(slots=True)
class ConnectorCounters:
    """Of all workers together: a chunk that two of them load counts twice."""

    lookups: int = 0
    failed_lookups: int = 0
    offered_chunks: int = 0  # that the pool had and the engine did not
    declined_chunks: int = 0  # of those: computing was taken to be quicker
    loads: int = 0
    failed_loads: int = 0
    loaded_chunks: int = 0
    failed_load_chunks: int = 0
    load_seconds: float = 0.0
    loaded_bytes: int = 0
    staging_tokens: int = 0
    disk_tokens: int = 0
    remote_tokens: int = 0
    stores: int = 0
    stored_chunks: int = 0
    deduplicated_chunks: int = 0
    failed_store_chunks: int = 0
    skipped_store_chunks: int = 0  # given up, as the engine needed their blocks
    store_seconds: float = 0.0
    stored_bytes: int = 0

    def decided(self, offered_chunks: int, chosen_chunks: int) -> None:
        """A request was offered chunks and will load some."""
        self.offered_chunks += offered_chunks
        self.declined_chunks += offered_chunks - chosen_chunks

    def count(self, end: LoadEnd | StoreEnd) -> None:
        """A load or store has ended."""
        if isinstance(end, LoadEnd):
            self.loads += 1
            self.loaded_chunks += end.result.loaded_chunks
            if not end.cancelled:
                self.failed_loads += bool(end.failed_chunks)
                self.failed_load_chunks += end.failed_chunks
            self.load_seconds += end.duration_s
            self.loaded_bytes += end.size_bytes
            self.staging_tokens += end.result.tokens.staging
            self.disk_tokens += end.result.tokens.disk
            self.remote_tokens += end.result.tokens.remote
        else:
            self.stores += 1
            self.stored_chunks += end.stored_chunks
            self.deduplicated_chunks += end.deduplicated_chunks
            self.failed_store_chunks += end.failed_chunks
            self.skipped_store_chunks += end.skipped_chunks
            self.store_seconds += end.duration_s
            self.stored_bytes += end.size_bytes

    def take(self) -> dict[str, int | float]:
        """What is not zero, by name; counting starts again."""
        taken = {field.name: value for field in fields(self) if (value := getattr(self, field.name))}
        for field in fields(self):
            setattr(self, field.name, field.default)
        return taken
