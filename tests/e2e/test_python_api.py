"""The program of docs/python-client.md, as printed, on a real cluster."""

from __future__ import annotations

import functools
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvpool
from kvpool.client.config import ClientConfig
from kvpool.testing import eventually, eventually_sync
from tests.e2e.cli_cluster import Cluster
from tests.fixtures.patience import PATIENCE_S, patient

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[2] / "docs" / "python-client.md"
AGENT = "unix:/run/kvpool/agent.sock"
BLOCKS, BLOCK_TOKENS, CHUNK = 40, 16, 128


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    cluster.run("cluster", "up", "--detach", "--arena-bytes", "256MiB", "--disk-bytes", "512MiB")
    yield cluster
    cluster.run("cluster", "down")


@pytest.fixture
def agent(cluster: Cluster) -> str:
    return f"unix:{cluster.state.of_role('agent')[0].endpoints['socket']}"


class Engine:
    """What the program takes as given: a paged cache, a prompt, a prefill. The KV of a token is its id."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.kv_tensors = [torch.zeros(2, BLOCKS, BLOCK_TOKENS, 8, 128, dtype=torch.bfloat16) for _ in range(32)]
        self.block_table = list(range(BLOCKS))[::-1][: -(-len(token_ids) // BLOCK_TOKENS)]
        self.computed_from: int | None = None

    def compute(self, token_ids: list[int], first_token: int, block_table: list[int]) -> None:
        self.computed_from = first_token
        for at in range(first_token, len(token_ids)):
            for layer in self.kv_tensors:
                layer[:, block_table[at // BLOCK_TOKENS], at % BLOCK_TOKENS] = token_ids[at]

    def run(self, program: Path) -> dict[str, Any]:
        return runpy.run_path(str(program), init_globals=vars(self) | {"compute": self.compute})

    def holds_the_prompt(self) -> bool:
        expected = torch.tensor(self.token_ids, dtype=torch.bfloat16)
        return all(
            torch.equal(plane[self.block_table].flatten(0, 1)[: len(self.token_ids), head, 0], expected)
            for layer in self.kv_tensors
            for plane in layer
            for head in (0, 7)
        )


@pytest.fixture
def program(agent: str, tmp_path: Path) -> Path:
    printed = PAGE.read_text().split("```python\n")[1].split("```")[0]
    assert AGENT in printed
    program = tmp_path / "program.py"
    program.write_text(printed.replace(AGENT, agent))
    return program


def test_the_program_of_the_page_computes_once_and_loads_afterwards(
    agent: str, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It has the defaults of production, by which an engine computes where this machine stands still.
    monkeypatch.setattr(kvpool, "connect", functools.partial(kvpool.connect, config=patient()))
    token_ids = np.random.default_rng(7).integers(0, 256, 2 * CHUNK + 50).tolist()  # exact in bf16
    first = Engine(token_ids)
    first.run(program)
    assert first.computed_from == 0

    def is_pooled() -> bool:
        """What is stored becomes known to the index a little later; what an agent let fall comes with the next run."""
        if pooled_tokens(agent, token_ids) == 2 * CHUNK:
            return True
        Engine(token_ids).run(program)
        return False

    eventually_sync(is_pooled, deadline_s=PATIENCE_S)
    second = Engine(token_ids)

    def has_loaded() -> bool:  # a match that is late on a busy machine is none
        loaded: kvpool.LoadResult = second.run(program)["loaded"]
        return second.computed_from == loaded.tokens.total == 2 * CHUNK

    eventually_sync(has_loaded, deadline_s=PATIENCE_S)
    assert second.holds_the_prompt()


def pooled_tokens(agent: str, token_ids: list[int]) -> int:
    model = kvpool.Model("my-model", "rev1", layers=32, kv_heads=8, head_dim=128, dtype="bf16")
    cache = kvpool.PagedCache.in_shared_memory(model, layout="contiguous", block_size=BLOCK_TOKENS, block_count=1)
    with kvpool.connect(agent, cache, config=patient()) as pool:
        found = pool.match(pool.prompt(token_ids))
        assert found.error is None
        return found.num_tokens


async def test_the_same_on_an_event_loop_layer_by_layer(agent: str) -> None:
    model = kvpool.Model("tiny", "1", layers=2, kv_heads=2, head_dim=16, dtype="fp16", chunk_tokens=16)
    tokens = list(range(40))

    def a_cache() -> tuple[kvpool.PagedCache, Any]:
        cache = kvpool.PagedCache.in_shared_memory(model, layout="contiguous", block_size=16, block_count=4)
        return cache, np.frombuffer(cache.buffers[0], np.float16)

    cache, memory = a_cache()
    async with await kvpool.AsyncPool.connect(agent, cache, config=patient()) as pool:
        memory[:] = 3

        async def is_stored() -> bool:  # an agent whose pagestore answers late lets chunks fall
            storing = await pool.store(pool.prompt(tokens), [1, 2, 3])
            await storing.wait_released(PATIENCE_S)
            result = await storing.result(PATIENCE_S)
            return result.stored_chunks + result.deduplicated_chunks == 2

        await eventually(is_stored)
    cache, memory = a_cache()
    async with await kvpool.AsyncPool.connect(agent, cache, config=patient()) as pool:
        handle = await pool.start_load(pool.prompt(tokens), [3, 0, 1], end_chunk=2)
        assert await handle.wait_layers(1, PATIENCE_S)
        result = await handle.result(PATIENCE_S)
        await handle.wait_released(PATIENCE_S)
    assert (result.num_tokens, result.error) == (32, None)
    planes = memory.reshape(4, 4, -1)
    assert (planes[:, [3, 0]] == 3).all() and not planes[:, [1, 2]].any()


def a_store(cluster: Cluster, name: str = "my-tier") -> kvpool.Store:
    config = kvpool.StoreConfig(
        index_endpoints=(cluster.state.of_role("index")[0].endpoints["endpoint"],),
        pagestore=f"unix:{cluster.state.of_role('pagestore')[0].endpoints['socket']}",
        match_timeout_s=PATIENCE_S,
        load_timeout_s=PATIENCE_S,
        store_timeout_s=PATIENCE_S,
        connect_timeout_s=PATIENCE_S,
    )
    return kvpool.connect_store(
        config.pagestore, index=config.index_endpoints, name=name, object_bytes=3_000_001, config=config
    )


def test_objects_are_put_once_and_had_by_key_without_an_agent(cluster: Cluster) -> None:
    content = [np.random.default_rng(seed).bytes(3_000_001) for seed in range(3)]
    keys: list[bytes | str | tuple[bytes, ...]] = ["a", b"b", (b"c", b"1")]
    with a_store(cluster) as first:
        assert first.put(keys, content) == [True] * 3
        with pytest.raises(kvpool.errors.InvalidRequest, match="3000001"):
            first.put(["d"], [b"short"])
    with a_store(cluster) as second:
        eventually_sync(lambda: second.exists([*keys, "absent"]) == [True] * 3 + [False], deadline_s=PATIENCE_S)
        buffers = [bytearray(3_000_001) for _ in range(4)]
        assert second.get([*keys, "absent"], buffers) == [True] * 3 + [False]
        assert [bytes(buffer) for buffer in buffers[:3]] == content
    with a_store(cluster, name="another") as other:
        assert other.exists(keys) == [False] * 3
    assert other.get(keys, buffers[:3]) == [False] * 3, "it is closed: everything is a miss"


def test_an_agent_that_is_not_there_is_named() -> None:
    model = kvpool.Model("tiny", "1", layers=2, kv_heads=2, head_dim=16)
    cache = kvpool.PagedCache.in_shared_memory(model, layout="vllm", block_size=16, block_count=16)
    with pytest.raises(kvpool.errors.ServiceUnavailable):
        kvpool.connect("unix:/nonexistent/agent.sock", cache, config=ClientConfig(connect_timeout_s=1.0))


def test_importing_the_package_loads_nothing_that_takes_time() -> None:
    code = (
        "import sys, kvpool; assert not set(sys.modules) & {'grpc', 'numpy', 'torch', 'google'};"
        "kvpool.connect; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_connecting_loads_only_what_engines_at_a_unix_socket_use() -> None:
    code = (
        "import sys, kvpool\n"
        "model = kvpool.Model('m', '1', layers=2, kv_heads=2, head_dim=16)\n"
        "cache = kvpool.PagedCache.in_shared_memory(model, layout='vllm', block_size=16, block_count=4)\n"
        "config = kvpool.ClientConfig(connect_timeout_s=1.0)\n"
        "try: kvpool.connect('unix:/nonexistent/agent.sock', cache, config=config)\n"
        "except kvpool.errors.ServiceUnavailable: pass\n"
        "print(*(name for name in sys.modules if name.split('.')[0] == 'kvpool' and not name.startswith('kvpool.v1')))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    run = [sys.executable, "-c", code]
    loaded = subprocess.run(run, check=True, timeout=60, capture_output=True, text=True, env=environment).stdout.split()
    other = [
        name
        for name in loaded
        if name.startswith(("kvpool.tracing", "kvpool.wire.tls_files", "kvpool.client.index", "kvpool.client.store"))
        or name in ("kvpool.wire.tls", "kvpool.core.cluster", "kvpool.core.page", "kvpool.core.policy")
    ]
    assert not other
    assert len(loaded) <= 40, loaded
