"""What `connect_store` refuses before anything is asked."""

from __future__ import annotations

import pytest

import kvpool


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ("nonsense", r"index_endpoints\[0\]"),
        ("http://host:7100", r"index_endpoints\[0\]"),
        (["127.0.0.1:7100", "127.0.0.1"], r"index_endpoints\[1\]"),
        ([7100], "index_endpoints"),
        ("", "index_endpoints"),
    ],
)
def test_a_malformed_index_is_refused_by_name(index: object, named: str) -> None:
    with pytest.raises(kvpool.errors.InvalidRequest, match=named):
        kvpool.connect_store("unix:/run/kvpool/pagestore.sock", index=index, name="n", object_bytes=1)  # type: ignore[arg-type]


def test_a_malformed_pagestore_is_refused_by_name() -> None:
    with pytest.raises(kvpool.errors.InvalidRequest, match=r"^pagestore must be"):
        kvpool.connect_store("/run/kvpool/pagestore.sock", index="127.0.0.1:7100", name="n", object_bytes=1)
