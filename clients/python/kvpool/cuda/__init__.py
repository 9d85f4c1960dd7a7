"""CUDA's driver interface as kvpool needs it: memory and events of other processes, pinned arenas, batched copies."""
