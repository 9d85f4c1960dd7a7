"""The vLLM connector's way to its agent when there is none."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from kvpool.client.config import ClientConfig
from kvpool.client.engine_registration import EngineRegistration
from kvpool.connectors.vllm.agent_connection import AgentConnection
from kvpool.core.errors import GeometryUnsupported, ServiceUnavailable
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from tests.fixtures.layout_presets import contiguous_layout
from tests.fixtures.patience import PATIENCE_S

SPEC = KeyspaceSpec("m", "r", (KvGroup(1, 1, 16),), Dtype.BF16, chunk_tokens=16)
NOWHERE = ClientConfig(agent_endpoint="unix:/nonexistent/agent.sock", connect_timeout_s=0.2)


def a_plan() -> EngineRegistration:
    return EngineRegistration(
        endpoint=NOWHERE.agent_endpoint,
        engine_name="e",
        keyspace_name="k",
        spec=SPEC,
        layout=contiguous_layout(SPEC, range(1), range(1), 16, 1),
        regions=(),
        match_only=True,
    )


def test_an_agent_that_is_not_there_is_said_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    connection = AgentConnection(lambda: [a_plan()], NOWHERE)
    assert connection.wait_first_attempt(PATIENCE_S)
    assert "until the agent can be reached" in caplog.text
    assert not connection.pools
    assert connection.close()
    assert caplog.text.count("until the agent can be reached") == 1


@pytest.mark.parametrize("error", [GeometryUnsupported("a hybrid model"), RuntimeError("planted")])
def test_an_engine_that_cannot_be_served_says_why_and_goes_on(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def registrations() -> list[EngineRegistration]:
        raise error

    connection = AgentConnection(registrations, NOWHERE)
    assert connection.wait_first_attempt(PATIENCE_S)
    assert str(error) in caplog.text
    assert not connection.pools
    assert connection.close()


def test_an_agent_that_is_not_found_yet_is_looked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    looked = threading.Semaphore(0)

    def registrations() -> list[EngineRegistration]:
        looked.release()
        raise ServiceUnavailable("no agent of GPU-a announces itself")

    connection = AgentConnection(registrations, replace(NOWHERE, backoff_initial_s=0.001, backoff_max_s=0.001))
    assert all(looked.acquire(timeout=PATIENCE_S) for _ in range(3))
    assert connection.wait_first_attempt(PATIENCE_S)
    assert connection.close()
    assert caplog.text.count("no agent of GPU-a") == 1


def test_nothing_can_be_begun_after_the_end() -> None:
    connection = AgentConnection(lambda: [a_plan()], NOWHERE)
    connection.close()
    assert connection.close()

    async def work() -> None: ...

    with pytest.raises(ServiceUnavailable):
        connection.start(work)
