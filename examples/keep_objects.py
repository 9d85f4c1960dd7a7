"""A tier in a page: run it twice against one cluster. The second run gets what the first one has put.

    kvpool cluster up --detach --index-port 7100
    python examples/keep_objects.py unix:$PWD/.kvpool/run/pagestore-0.sock 127.0.0.1:7100

Each byte of an object is its number, so that it can check what it gets. docs/python-client.md explains each call.
"""

import sys

import kvpool

OBJECT_BYTES, OBJECTS = 1 << 20, 8


def main(pagestore: str, index: str) -> None:
    keys = [f"object-{number}" for number in range(OBJECTS)]
    buffers = [bytearray(OBJECT_BYTES) for _ in keys]
    with kvpool.connect_store(pagestore, index=index, name="example", object_bytes=OBJECT_BYTES) as store:
        there = [number for number, exists in enumerate(store.exists(keys)) if exists]
        came = store.get([keys[number] for number in there], [buffers[number] for number in there])
        loaded = [number for number, has_come in zip(there, came, strict=True) if has_come]
        missing = [number for number in range(OBJECTS) if number not in loaded]
        for number in missing:  # what a cache computes
            buffers[number][:] = bytes([number]) * OBJECT_BYTES
        stored = store.put([keys[number] for number in missing], [buffers[number] for number in missing])
    for number, buffer in enumerate(buffers):
        assert buffer == bytes([number]) * OBJECT_BYTES, "not this object"
    print(f"{len(loaded)} objects loaded, {sum(stored)} stored")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
