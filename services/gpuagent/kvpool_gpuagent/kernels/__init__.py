"""Triton kernels that move KV rows, one op in one file, each beside its torch reference. Imports nothing by itself."""
