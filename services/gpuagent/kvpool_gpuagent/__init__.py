"""The gpuagent: moves bytes between one engine rank's paged KV cache and pages."""

from kvpool_server.process import poll_grpc_directly

poll_grpc_directly()  # gRPC looks when it is imported, and not again
