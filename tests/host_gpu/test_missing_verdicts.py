"""Pages are used only if a kernel has said that they are good, not because none has said otherwise."""

from __future__ import annotations

import pytest

from kvpool.core import layout_presets
from kvpool.core.elements import Dtype
from kvpool.core.geometry import AttentionKind, KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.page import PageFaultKind
from kvpool.kernels.launching import Launch
from kvpool_gpuagent.core.ways import Way
from tests.fixtures.gpu_caches import host_cache

GROUP = KvGroup(layers=1, kv_heads=2, head_dim=16, latent_dim=0, attention=AttentionKind.FULL)
SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(GROUP,), dtype=Dtype.BF16, chunk_tokens=32)


async def test_a_page_that_no_kernel_has_judged_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with host_cache(SPEC, layout_presets.vllm_nhd_layout) as world:
        world.cache.load.chooser.pin(Way.BURSTS)
        copies = [world.copy(0, shard, [3, 1]) for shard in range(world.grid.shard_count)]
        assert await world.cache.gather(copies, lambda: False)
        assert await world.cache.scatter(copies) == [None] * len(copies)
        start = Launch.start

        def all_but_sums(launch: Launch, pages: int, *addresses: int, programs: int | None = None) -> None:
            if "VERIFY" not in launch._constants:
                start(launch, pages, *addresses, programs=programs)

        monkeypatch.setattr(Launch, "start", all_but_sums)
        for fault in await world.cache.scatter(copies):
            assert fault is not None
            assert fault.kind is PageFaultKind.BAD_SUM
