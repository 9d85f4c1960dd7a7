"""The index service: how much of a chain exists and where, who is alive, and where new chunks should go."""

from kvpool_server.process import poll_grpc_directly

poll_grpc_directly()  # gRPC looks when it is imported, and not again
