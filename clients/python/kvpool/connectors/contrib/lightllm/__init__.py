"""lightllm: stand-ins for its CPU cache classes, whose pages come from the cluster and go there."""
