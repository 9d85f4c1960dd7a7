"""What every kvpool service shares: configuration, gRPC servers, interceptors, life cycle, metrics and logs.

Knows nothing about any one service. A service's `main` wires these pieces; nothing below `main` imports them.
"""
