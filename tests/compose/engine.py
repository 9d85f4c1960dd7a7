"""An engine in a container of its own, fed to its Python on stdin: `python - AGENT store|load SEED CHUNKS`.

Prints one line of JSON. A load compares every byte with what a store of the same seed wrote.
"""

import json
import sys
import time

import numpy as np

from bench.rig.engine import BLOCKS_OF_16, BenchEngine
from bench.rig.machine import random_bytes


def main() -> None:
    agent, operation, seed, chunk_count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    started_s = time.monotonic()
    engine = BenchEngine(agent, BLOCKS_OF_16, chunk_count)
    said: dict[str, object] = {"bytes": engine.size_bytes}
    try:
        if operation == "store":
            engine.fill(seed)
            engine.put_rate(engine.chain(seed))
        else:
            wanted = random_bytes(engine.cache.nbytes, seed)
            engine.cache[:] = 0
            _, tokens = engine.get_rate(engine.chain(seed))
            said["equal"] = bool(np.array_equal(engine.cache, wanted))
            said["tokens"] = {name: getattr(tokens, name) for name in ("staging", "disk", "remote")}
    finally:
        engine.close()
    print(json.dumps({**said, "seconds": round(time.monotonic() - started_s, 3)}))


main()
