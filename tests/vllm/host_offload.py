"""vLLM's tiering offload where "GPU" blocks are in host memory: vLLM itself copies by CUDA only.

All is vLLM's own but for the copies between a worker's KV cache and the CPU region, which run at once. Loaded as an
offloading spec by `spec_module_path`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not installed where this is checked
    """Its worker copies within host memory."""

    _worker: HostWorker | None

    def _uses_shared_region(self) -> bool:
        return True

    def get_worker(self, kv_caches: CanonicalKVCaches) -> HostWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """As vLLM's CPUOffloadingWorker in its direct layout. spoiled: loads bring `zeroes` instead, or what the last load
    before brought (`kept`)."""

    spoiled = ""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region, self._blocks_per_chunk = region, blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._caches, self._chunks = [], []
        for one in kv_caches.tensors:
            self._caches.append(one.tensor.view(torch.int8).view(-1, one.page_size_bytes))
            chunks = region.create_next_worker_view(one.page_size_bytes * blocks_per_chunk)
            self._chunks.append(chunks.unflatten(1, (blocks_per_chunk, one.page_size_bytes)))
        self._finished: list[TransferResult] = []
        self._kept: dict[tuple[int, int], torch.Tensor] = {}  # by tensor and size, a page that was loaded

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.block_ids, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, dst_spec, src_spec.block_ids, store=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way between calls."""

    def shutdown(self) -> None:
        self._caches, self._chunks = [], []
        self._region.cleanup()

    def _copy(self, job_id: int, cache: Any, chunk_ids: Any, *, store: bool) -> bool:
        first_block = first_chunk = moved_bytes = 0
        for refs, count, index in zip(self._refs, cache.group_sizes, cache.block_indices, strict=True):
            if not count:
                continue
            skipped = index % self._blocks_per_chunk
            for at in range(count):
                block = int(cache.block_ids[first_block + at])
                chunk, part = divmod(skipped + at, self._blocks_per_chunk)
                for ref in refs:
                    used = slice(0, ref.page_size_bytes)
                    inside = self._caches[ref.tensor_idx][block, used]
                    outside = self._chunks[ref.tensor_idx][int(chunk_ids[first_chunk + chunk]), part, used]
                    if store:
                        outside.copy_(inside)
                    elif HostWorker.spoiled:
                        inside.copy_(
                            self._kept[ref.tensor_idx, ref.page_size_bytes]
                            if HostWorker.spoiled == "kept"
                            else torch.zeros_like(inside)
                        )
                    else:
                        inside.copy_(outside)
                        self._kept[ref.tensor_idx, ref.page_size_bytes] = outside.clone()
                    moved_bytes += ref.page_size_bytes
            first_block += count
            first_chunk += -(-(skipped + count) // self._blocks_per_chunk)
        assert (first_block, first_chunk) == (len(cache.block_ids), len(chunk_ids))
        self._finished.append(
            TransferResult(job_id=job_id, success=True, transfer_size=moved_bytes, transfer_time=1e-6)
        )
        return True
