"""Counters of an engine's use of the pool since they were last read."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvpool.connectors.vllm.step_jobs import LoadReport, StoreReport


@dataclass(slots=True)
class ConnectorCounters:
    """Counters of all workers together: a chunk that two of them load counts twice. Chunks of several pages count once
    where they are offered and declined, and once a page elsewhere."""

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
    gpu_tokens: int = 0
    stores: int = 0
    stored_chunks: int = 0
    deduplicated_chunks: int = 0
    failed_store_chunks: int = 0
    skipped_store_chunks: int = 0  # given up, as the engine needed their blocks
    store_seconds: float = 0.0
    stored_bytes: int = 0

    def decided(self, offered_chunks: int, chosen_chunks: int) -> None:
        """Count a request that was offered chunks and will load some of them."""
        self.offered_chunks += offered_chunks
        self.declined_chunks += offered_chunks - chosen_chunks

    def count(self, report: LoadReport | StoreReport) -> None:
        """Count a load or store that has ended."""
        if isinstance(report, LoadReport):
            self.loads += 1
            self.loaded_chunks += report.result.loaded_chunks
            if not report.cancelled:
                self.failed_loads += bool(report.failed_chunks)
                self.failed_load_chunks += report.failed_chunks
            self.load_seconds += report.duration_s
            self.loaded_bytes += report.size_bytes
            self.staging_tokens += report.result.tokens.staging
            self.disk_tokens += report.result.tokens.disk
            self.remote_tokens += report.result.tokens.remote
            self.gpu_tokens += report.result.tokens.gpu
        else:
            self.stores += 1
            self.stored_chunks += report.stored_chunks
            self.deduplicated_chunks += report.deduplicated_chunks
            self.failed_store_chunks += report.failed_chunks
            self.skipped_store_chunks += report.skipped_chunks
            self.store_seconds += report.duration_s
            self.stored_bytes += report.size_bytes

    def take(self) -> dict[str, int | float]:
        """Return the counters that are not zero, by name, and reset them."""
        if self == _ZERO:  # as after most steps
            return {}
        taken = {field.name: value for field in fields(self) if (value := getattr(self, field.name))}
        for field in fields(self):
            setattr(self, field.name, field.default)
        return taken


_ZERO = ConnectorCounters()
