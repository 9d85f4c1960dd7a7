"""What orders name, as the pool takes it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpool.client.hashing import Chain
from kvpool.connectors.vllm.orders import LoadOrder, StoreOrder


def chain_of(order: LoadOrder | StoreOrder, chunk_tokens: int) -> Chain:
    """As far as the order goes."""
    return Chain(chunk_tokens, order.token_count, order.hashes)


def block_table(order: LoadOrder | StoreOrder, split: int) -> npt.NDArray[np.int64]:
    """Blocks of the tensors, of which each of vLLM's blocks is `split`."""
    blocks = np.array(order.block_ids, dtype=np.int64)
    return blocks if split == 1 else (blocks[:, None] * split + np.arange(split)).reshape(-1)
