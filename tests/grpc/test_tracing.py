"""One request followed from an engine's own span over every border between processes, in spans and in log lines."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry import trace

import kvpool.client.pagestore
from kvpool.client.hashing import Prompt
from kvpool.client.page_items import AcquireItem
from kvpool.client.pool import AsyncPool
from kvpool.core.cluster import RemoteSource
from kvpool.testing import eventually
from kvpool.v1 import index_pb2, pagestore_pb2
from kvpool_pagestore.ports import PullItem
from kvpool_server.logs import LogFormat, LogLevel, configure_logs, show_trace_of
from tests.fixtures.agent import SPEC, EngineProcess
from tests.fixtures.channels import opened_channels
from tests.fixtures.pagestore import ScriptedPeers, metadata, new_world, page_key
from tests.fixtures.pagestore_server import served
from tests.fixtures.traced_cluster import Collector, Host, names, traced_host, traced_index

CHUNKS = 3
TOKENS = np.random.default_rng(5).integers(0, 1 << 30, CHUNKS * SPEC.chunk_tokens + 1, dtype=np.uint32)


@pytest.fixture
def log_lines() -> Iterator[io.StringIO]:
    """JSON lines at level debug, as a service writes them; the root logger is put back afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    configure_logs(service="test", level=LogLevel.DEBUG, log_format=LogFormat.JSON, stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def block_table(engine: EngineProcess) -> list[int]:
    return [int(block) for block in engine.blocks.ravel()]


async def store(pool: AsyncPool, engine: EngineProcess, chain: Prompt) -> None:
    engine.compute(chain, range(CHUNKS))
    ticket = await pool.store(chain, block_table(engine), first_chunk=0, end_chunk=CHUNKS)
    assert (await ticket.result(60)).stored_chunks == CHUNKS


async def load_as_one_request(host: Host, pool: AsyncPool, engine: EngineProcess) -> tuple[Prompt, int]:
    """Match and load inside of the engine's own span; its trace id."""
    chain = pool.prompt(TOKENS)

    async def found() -> bool:
        return (await pool.match(chain)).matched_chunks == CHUNKS

    await eventually(found)
    with host.tracer.request("llm_request"):
        trace_id = int(host.tracer.log_fields()["trace_id"], 16)
        match = await pool.match(chain)
        report = await pool.load(chain, block_table(engine), first_chunk=0, end_chunk=match.matched_chunks)
    assert report.loaded_chunks == CHUNKS
    assert engine.holds(chain, range(CHUNKS))
    return chain, trace_id


async def test_one_request_is_one_trace_across_all_services(log_lines: io.StringIO) -> None:
    collector = Collector()
    async with (
        traced_index(collector) as index,
        traced_host("a", index, collector) as a,
        traced_host("b", index, collector) as b,
    ):
        show_trace_of(a.tracer)
        pool_a, engine_a = await a.open_pool()
        await store(pool_a, engine_a, pool_a.prompt(TOKENS))
        pool_b, engine_b = await b.open_pool()
        _, trace_id = await load_as_one_request(b, pool_b, engine_b)
        await pool_a.close()
        await pool_b.close()

    def one(name: str) -> Any:
        return collector.named(name, trace_id)[0]

    assert collector.lineage(one("index.store.read")) == [
        "index/index.store.read",
        "index/index.match",
        "gpuagent-b/kvpool.index.match",
        "gpuagent-b/gpuagent.match",
        "engine-b/kvpool.match",
        "engine-b/llm_request",
    ]
    assert collector.lineage(one("kvpool.v1.PageTransferService/ReadPages")) == [
        "pagestore-a/kvpool.v1.PageTransferService/ReadPages",
        "pagestore-b/pagestore.pull",
        "pagestore-b/pagestore.acquire",
        "gpuagent-b/kvpool.pagestore.acquire",
        "gpuagent-b/gpuagent.load",
        "engine-b/kvpool.load",
        "engine-b/llm_request",
    ]
    assert collector.lineage(one("gpuagent.scatter"))[1] == "gpuagent-b/gpuagent.load"
    assert one("kvpool.load").attributes["kvpool.tokens.remote"] == CHUNKS * SPEC.chunk_tokens
    assert one("pagestore.acquire").attributes["kvpool.pages.remote"] == CHUNKS
    assert all(span.status.status_code is not trace.StatusCode.ERROR for _, span in collector.spans(trace_id))
    lines = [json.loads(line) for line in log_lines.getvalue().splitlines()]
    reported = {line["logger"]: line for line in lines if line.get("trace_id") == f"{trace_id:032x}"}
    spans = {f"{span.context.span_id:016x}" for _, span in collector.spans(trace_id)}
    for part in ("kvpool_gpuagent", "kvpool_index", "kvpool_pagestore"):
        line = next(line for logger, line in reported.items() if logger.startswith(part))
        assert line["span_id"] in spans
        assert line["request_id"] > 0


async def test_a_store_is_one_trace_and_its_write_back_is_linked_to_it() -> None:
    collector = Collector()
    async with traced_index(collector) as index, traced_host("a", index, collector) as a:
        pool, engine = await a.open_pool()
        await store(pool, engine, pool.prompt(TOKENS))
        await a.running.engine.flush("tenant", b"")
        await pool.close()
    root = collector.named("kvpool.store")[0]
    in_trace = names(collector.spans(root.context.trace_id))
    assert in_trace == {
        "engine-a/kvpool.store",
        "gpuagent-a/gpuagent.store",
        "gpuagent-a/kvpool.pagestore.reserve",
        "pagestore-a/pagestore.reserve",
        "gpuagent-a/gpuagent.gather",
        "gpuagent-a/kvpool.pagestore.commit",
        "pagestore-a/pagestore.commit",
    }
    assert collector.attributes("kvpool.store")["kvpool.chunks.served"] == CHUNKS
    commit = collector.named("pagestore.commit")[0]
    write_backs = collector.named("pagestore.write_back")
    assert write_backs
    for write_back in write_backs:
        assert write_back.parent is None
        assert write_back.context.trace_id != root.context.trace_id
        assert {link.context.span_id for link in write_back.links} <= {commit.context.span_id}


async def test_a_page_on_disk_is_promoted_as_a_part_of_the_request() -> None:
    collector = Collector()
    async with traced_index(collector) as index, traced_host("a", index, collector, staging="transit") as a:
        pool, engine = await a.open_pool()
        await store(pool, engine, pool.prompt(TOKENS))
        await a.running.engine.flush("tenant", b"")
        engine.clear()
        _, trace_id = await load_as_one_request(a, pool, engine)
        await pool.close()
    promoted = collector.named("pagestore.promote", trace_id)
    assert len(promoted) == CHUNKS
    assert collector.lineage(promoted[0])[1:4] == [
        "pagestore-a/pagestore.acquire",
        "gpuagent-a/kvpool.pagestore.acquire",
        "gpuagent-a/gpuagent.load",
    ]
    assert collector.attributes("pagestore.acquire", trace_id)["kvpool.pages.disk"] == CHUNKS


async def test_no_span_reveals_a_prompt() -> None:
    collector = Collector()
    async with traced_index(collector) as index, traced_host("a", index, collector) as a:
        pool, engine = await a.open_pool()
        chain = pool.prompt(TOKENS)
        await store(pool, engine, chain)
        await load_as_one_request(a, pool, engine)
        await pool.close()
    reported = " ".join(str(dict(span.attributes or {})) for _, span in collector.spans())
    assert chain.hashes[0].hex() not in reported
    assert all(
        not isinstance(value, tuple) for _, span in collector.spans() for value in (span.attributes or {}).values()
    )
    assert not any(str(token) in reported for token in TOKENS[:8])


async def test_unary_calls_tell_their_status_and_housekeeping_begins_no_trace() -> None:
    collector, traceparent = Collector(), f"00-{'a' * 32}-{'b' * 16}-01"
    async with traced_index(collector) as index:
        await index.stub.ListNodes(index_pb2.ListNodesRequest())
        assert collector.spans() == []
        await index.stub.ListNodes(index_pb2.ListNodesRequest(), metadata=(("traceparent", traceparent),))
        with pytest.raises(grpc.aio.AioRpcError):
            await index.stub.OpenKeyspace(index_pb2.OpenKeyspaceRequest(name="chat"))
        with pytest.raises(grpc.aio.AioRpcError):  # a malformed context is none, and no error
            await index.stub.Place(index_pb2.PlaceRequest(), metadata=(("traceparent", "x" * 55),))
    (carried,) = collector.named("kvpool.v1.IndexService/ListNodes")
    assert carried.parent is not None and f"{carried.parent.span_id:016x}" == "b" * 16
    refused = collector.attributes("kvpool.v1.IndexService/OpenKeyspace")
    assert (refused["error.type"], refused["rpc.grpc.status_code"]) == ("INVALID_REQUEST", 3)
    assert collector.named("kvpool.v1.IndexService/Place")[0].parent is None


async def test_an_acquire_whose_session_ends_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks into a request that was cut off wants to see what it waited for."""
    collector, gate, pulling = Collector(), threading.Event(), threading.Event()

    def wait(source: RemoteSource, item: PullItem) -> bool:
        pulling.set()
        return not gate.wait(60)

    channels = opened_channels(monkeypatch, kvpool.client.pagestore)
    with new_world() as world:
        world.tracer, world.peers = collector.tracer("pagestore"), ScriptedPeers(wait)
        async with served(world) as store:
            session = await store.open()
            elsewhere = RemoteSource(node_id=b"n" * 16, incarnation=1, bulk_endpoint="h:1")
            item = AcquireItem(page_key(1), sources=(elsewhere,), metadata=metadata(1))
            async with session.acquire([item], wait_s=60.0):
                await eventually(pulling.is_set)
                await channels[0].close()  # as where the engine was killed
                await eventually(lambda: store.running.engine.gauges().sessions == 0)
            gate.set()
    reported = collector.attributes("pagestore.acquire")
    assert (reported["error.type"], reported["kvpool.pages"]) == ("STOPPED", 1)


async def test_a_refused_page_stream_reports_its_status() -> None:
    collector = Collector()
    async with traced_index(collector) as index, traced_host("a", index, collector) as a:
        bulk_endpoint = a.node.bulk_endpoint
        async with grpc.aio.insecure_channel(bulk_endpoint) as channel:
            read: Any = channel.unary_stream("/kvpool.v1.PageTransferService/ReadPages")
            with pytest.raises(grpc.aio.AioRpcError):
                await read(pagestore_pb2.ReadPagesRequest(keys=[b"short"]).SerializeToString()).read()
    reported = collector.attributes("kvpool.v1.PageTransferService/ReadPages")
    assert (reported["error.type"], reported["rpc.grpc.status_code"]) == ("INVALID_REQUEST", 3)
