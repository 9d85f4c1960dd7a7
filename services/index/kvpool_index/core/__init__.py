"""What the index decides, without touching the world: values of chunks, matches, placement, liveness, events."""
