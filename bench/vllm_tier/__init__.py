"""kvpool's tier below vLLM's offloading, beside vLLM's own file tier, no tier, and memcpy."""
