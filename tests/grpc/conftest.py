"""What holds for every test that serves in its process."""

import pytest

from tests.fixtures.patience import patient_agents


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What agents wait for others is not what these tests are about, and the machine may stand still."""
    patient_agents(monkeypatch)
