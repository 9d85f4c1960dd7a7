"""What agents answer, as values that engines can reckon with."""

from math import inf, nan

import pytest

from kvpool.client.engine_items import EngineMatchRun, EngineSource, MatchResult, match_from_proto
from kvpool.v1 import gpuagent_pb2 as pb


@pytest.mark.parametrize(("reported_ms", "taken_ms"), [(1.5, 1.5), (0.0, 0.0), (-1.0, 0.0), (nan, 0.0), (inf, 0.0)])
def test_an_estimate_that_is_no_time_says_that_nothing_was_measured(reported_ms: float, taken_ms: float) -> None:
    run = pb.EngineMatchRun(chunk_count=3, source=pb.ENGINE_SOURCE_DISK, estimated_load_ms=reported_ms)
    match = match_from_proto(pb.EngineMatchResponse(matched_chunks=3, runs=[run]))
    assert match == MatchResult(3, runs=(EngineMatchRun(3, EngineSource.DISK, taken_ms),))
