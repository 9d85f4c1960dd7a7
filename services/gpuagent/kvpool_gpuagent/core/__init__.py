"""Pure decisions of the gpuagent: requests, windows, estimates."""
