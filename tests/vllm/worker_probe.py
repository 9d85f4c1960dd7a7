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

    def spoil_loads(self, group: int, how: str) -> None:
        """From now on the blocks that loads fill of one KV cache group hold no KV ("zeroes"), or that of other tokens
        of the prompt ("others"), once a load has ended. group: -1 spoils none."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        side = get_kv_transfer_group()._worker
        load = type(side)._load.__get__(side)

        async def load_and_spoil(pool: Any, running: Any, point: Any) -> Any:
            result, order = await load(pool, running, point), running.order
            if order.group == group:
                block_tokens = side._groups[group].block_tokens
                blocks = order.block_ids[order.first_token // block_tokens : -(-order.end_token // block_tokens)]
                for tensor in self.model_runner.kv_caches:  # of other groups too: they have other blocks of it
                    tensor[blocks] = 0 if how == "zeroes" else tensor[blocks[:1]].clone()
            return result

        side._load = load_and_spoil

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
