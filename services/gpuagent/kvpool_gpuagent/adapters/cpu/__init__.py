"""Engine caches in shared memory."""
