"""Page streams: gRPC threads on one side, the engine on its event loop on the other."""
