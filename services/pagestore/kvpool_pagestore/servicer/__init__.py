"""Translates between gRPC and the engine."""
