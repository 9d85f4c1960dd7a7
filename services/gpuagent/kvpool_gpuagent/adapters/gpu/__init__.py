"""Engine caches on a GPU."""
