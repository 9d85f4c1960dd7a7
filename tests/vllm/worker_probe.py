"""What tests look at in a worker of vLLM, which mixes it into its own class (`worker_extension_cls`)."""

from __future__ import annotations

import hashlib
from typing import Any


class WorkerProbe:
    """Methods are called by name, with plain values; vLLM refuses names that its worker has."""

    model_runner: Any  # the worker's

    def watch_orders(self) -> None:
        """Note from now on what the connector is ordered to load and to store."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        bind = connector.bind_connector_metadata
        self._orders: list[tuple[str, list[int]]] = []

        def bind_and_note(metadata: Any) -> None:
            self._orders += [("store", order.block_ids.tolist()) for order in metadata.orders.stores]
            self._orders += [("load", order.block_ids.tolist()) for order in metadata.orders.loads]
            bind(metadata)

        connector.bind_connector_metadata = bind_and_note

    def ordered_blocks(self) -> list[tuple[str, list[str]]]:
        """Since `watch_orders`: what was ordered, and digests over all layers of its blocks as they are now."""
        return [(kind, [self._block_digest(block) for block in blocks]) for kind, blocks in self._orders]

    def block_digest(self, block: int) -> str:
        """Of its bytes in all layers."""
        return self._block_digest(block)

    def _block_digest(self, block: int) -> str:
        import torch

        digest = hashlib.blake2b(digest_size=16)
        for tensor in self.model_runner.kv_caches:
            digest.update(tensor[block].contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
