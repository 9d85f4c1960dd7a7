"""Where engines compute: what was asked for, or what can be had."""

import pytest

from demo.device import pick_device
from kvpool.core.errors import NotServed
from kvpool.cuda.driver import Driver


def test_the_cpu_is_always_there() -> None:
    assert pick_device("cpu") == "cpu"


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    with pytest.raises(NotServed, match="torch sees no GPU"):
        pick_device("cuda")


@pytest.mark.parametrize(("has_driver", "expected"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_a_gpu_that_an_agent_can_use(
    monkeypatch: pytest.MonkeyPatch, has_driver: bool, expected: str
) -> None:
    def load() -> None:
        if not has_driver:
            raise NotServed("there is no libcuda.so.1")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(Driver, "load", load)
    assert pick_device("auto") == expected
