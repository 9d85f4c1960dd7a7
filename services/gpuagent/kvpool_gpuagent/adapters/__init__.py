"""Edges of the gpuagent: devices and page pools."""
