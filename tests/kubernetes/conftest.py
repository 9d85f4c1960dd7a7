"""Pods for real: `make smoke-kubernetes`, on the cluster of the current kubectl context. Nothing is collected
elsewhere, for it takes minutes, needs the images on the cluster's nodes, and makes namespaces there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.kubernetes.kube import SMOKE_VARIABLE, Kube

collect_ignore_glob = [] if os.environ.get(SMOKE_VARIABLE) else ["test_*.py"]


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    """The cluster; what a module applied is removed after it."""
    kube = Kube()
    try:
        yield kube
    finally:
        kube.remove()
