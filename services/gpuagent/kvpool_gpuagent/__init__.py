"""The gpuagent: moves bytes between one engine rank's paged KV cache and pages."""
