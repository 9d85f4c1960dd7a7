"""Measures a real vLLM with CUDA, with and without kvpool: `python -m bench.vllm_gpu`. See bench/README.md."""
