"""The public API on a GPU's tensors, and beside transformers: each loads what the other has stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvpool
from kvpool.connectors.transformers import SharedPrefixGenerator
from kvpool.testing import eventually_sync
from tests.fixtures.gpu_cluster import GpuHost
from tests.fixtures.patience import PATIENCE_S, patient
from tests.unit.connectors.tiny_models import prompt, tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(110)]

DEVICE, BLOCK, BLOCKS, CHUNK = "cuda:0", 16, 64, 128
TOKENS = 3 * CHUNK + 40


class Engine:
    """A paged cache as vLLM's, blocks in reverse order."""

    def __init__(self, model: kvpool.Model, *, layers: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        self.tensors = [torch.zeros(2, BLOCKS, BLOCK, heads, dim, dtype=dtype, device=DEVICE) for _ in range(layers)]
        self.cache = kvpool.PagedCache(self.tensors, model, layout="vllm", block_size=BLOCK)
        self.blocks = list(range(BLOCKS))[::-1][: -(-TOKENS // BLOCK)]

    def rows(self, layer: int) -> torch.Tensor:
        """[2, TOKENS, heads, dim] of the prompt."""
        return self.tensors[layer][:, self.blocks].flatten(1, 2)[:, :TOKENS]

    def fill(self, layer: int, rows: torch.Tensor) -> None:
        padded = torch.zeros(2, len(self.blocks) * BLOCK, *rows.shape[2:], dtype=rows.dtype, device=DEVICE)
        padded[:, :TOKENS] = rows
        self.tensors[layer][:, self.blocks] = padded.view(2, len(self.blocks), BLOCK, *rows.shape[2:])


def await_pooled(pool: kvpool.Pool, tokens: list[int]) -> None:
    eventually_sync(lambda: pool.match(pool.prompt(tokens)).matched_chunks == TOKENS // CHUNK, deadline_s=PATIENCE_S)


def test_what_one_engine_stores_another_loads(host: GpuHost) -> None:
    model = kvpool.Model("api on a GPU", "1", layers=4, kv_heads=8, head_dim=64, dtype="bf16")
    shape: dict[str, Any] = {"layers": 4, "heads": 8, "dim": 64, "dtype": torch.bfloat16}
    first, second = Engine(model, **shape), Engine(model, **shape)
    tokens = prompt(TOKENS, seed=801)[0].tolist()
    for layer in range(4):
        first.fill(layer, torch.randn(2, TOKENS, 8, 64, device=DEVICE).to(torch.bfloat16))
    with kvpool.connect(host.endpoint(), first.cache, config=patient()) as pool:
        assert pool.load(pool.prompt(tokens), first.blocks).num_tokens == 0
        stored = pool.store(pool.prompt(tokens), first.blocks).result(PATIENCE_S)
        assert stored.stored_chunks == TOKENS // CHUNK
        await_pooled(pool, tokens)
    with kvpool.connect(host.endpoint(), second.cache, config=patient()) as pool:
        loaded = pool.load(pool.prompt(tokens), second.blocks)
        assert loaded.num_tokens == TOKENS // CHUNK * CHUNK
        for layer in range(4):
            assert torch.equal(second.rows(layer)[:, : loaded.num_tokens], first.rows(layer)[:, : loaded.num_tokens])
            assert not second.rows(layer)[:, loaded.num_tokens :].any()


def test_transformers_and_the_api_load_what_the_other_has_computed(host: GpuHost, tmp_path: Path) -> None:
    network: Any = tiny_llama()
    network.save_pretrained(tmp_path / "model")
    network = type(network).from_pretrained(tmp_path / "model").to(DEVICE).eval()
    model = kvpool.checkpoint_model(tmp_path / "model")
    by_transformers, by_api = (prompt(TOKENS, seed=seed) for seed in (802, 803))

    def generator() -> SharedPrefixGenerator:
        return SharedPrefixGenerator.connect(network, host.endpoint(), cache_bytes=8 << 20, always_load=True)

    def generated(engine: SharedPrefixGenerator, ids: torch.Tensor) -> Any:
        return engine.generate(ids.to(DEVICE), max_new_tokens=8, do_sample=False)

    def computed(ids: torch.Tensor) -> list[torch.Tensor]:
        """Of each layer K and V, [2, tokens, heads, dim]."""
        with torch.no_grad():
            layers = network(ids.to(DEVICE), use_cache=True).past_key_values.layers
        return [torch.stack([layer.keys[0], layer.values[0]]).transpose(1, 2) for layer in layers]

    with generator() as engine:
        generated(engine, by_transformers)
        assert engine.flush_stores(30)
    own = Engine(model, layers=2, heads=2, dim=16, dtype=torch.float32)
    with kvpool.connect(host.endpoint(), own.cache, config=patient()) as pool:
        tokens = by_transformers[0].tolist()
        await_pooled(pool, tokens)
        loaded = pool.load(pool.prompt(tokens), own.blocks).num_tokens
        assert loaded == TOKENS // CHUNK * CHUNK
        for layer, expected in enumerate(computed(by_transformers)):
            torch.testing.assert_close(own.rows(layer)[:, :loaded], expected[:, :loaded], rtol=1e-4, atol=1e-4)
        tokens = by_api[0].tolist()
        for layer, rows in enumerate(computed(by_api)):
            own.fill(layer, rows)
        pool.store(pool.prompt(tokens), own.blocks).result(PATIENCE_S)
        await_pooled(pool, tokens)
    # Else transformers takes the tokens that are its padding for that.
    mask = {"attention_mask": torch.ones_like(by_api, device=DEVICE)}
    alone = network.generate(by_api.to(DEVICE), max_new_tokens=8, do_sample=False, **mask).tolist()
    with generator() as engine:
        result = generated(engine, by_api)
    assert result.stats.prompt_tokens.recomputed == TOKENS - loaded
    assert result.sequences.tolist() == alone
