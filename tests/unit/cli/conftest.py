"""What tests of commands share."""

from dataclasses import replace

import pytest

from kvpool.client.config import ClientConfig
from kvpool_cli import targets
from kvpool_cli.targets import Target


@pytest.fixture
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose connection is refused fails at once: the pause before another attempt passes its deadline."""
    config_of = targets.client_config

    def without_retries(target: Target) -> ClientConfig:
        return replace(config_of(target), backoff_initial_s=60.0, backoff_max_s=60.0)

    monkeypatch.setattr(targets, "client_config", without_retries)
