"""An engine in a page: run it twice against one cluster. The second run loads what the first one has computed.

    kvpool cluster up --detach
    python examples/share_prefix.py unix:.kvpool/run/agent-0.sock

Its "KV" of a token is the token's id, so that it can check what it loads. docs/python-client.md explains each call.
"""

import sys

import numpy as np

import kvpool

BLOCK_TOKENS, BLOCKS = 16, 32


def main(agent: str) -> None:
    model = kvpool.Model("example", "1", layers=2, kv_heads=2, head_dim=16, dtype="fp16")
    cache = kvpool.PagedCache.in_shared_memory(model, layout="contiguous", block_size=BLOCK_TOKENS, block_count=BLOCKS)
    # [layers, K and V, blocks, tokens, heads, head_dim]
    kv = np.frombuffer(cache.buffers[0], np.float16).reshape(2, 2, BLOCKS, BLOCK_TOKENS, 2, 16)
    tokens = list(range(300))
    block_table = list(range(-(-len(tokens) // BLOCK_TOKENS)))[::-1]  # any blocks will do
    config = kvpool.ClientConfig(connect_timeout_s=60, match_timeout_s=30)
    with kvpool.connect(agent, cache, config=config) as pool:
        prompt = pool.prompt(tokens)
        loaded = pool.load(prompt, block_table)
        for at in range(loaded.num_tokens, len(tokens)):  # an engine's prefill
            kv[:, :, block_table[at // BLOCK_TOKENS], at % BLOCK_TOKENS] = tokens[at]
        store = pool.store(prompt, block_table)
        store.wait_released()
        for at, token in enumerate(tokens):
            assert (kv[:, :, block_table[at // BLOCK_TOKENS], at % BLOCK_TOKENS] == token).all(), "not this prompt's KV"
        print(f"{loaded.num_tokens} tokens loaded, {store.result().stored_chunks} chunks stored")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
