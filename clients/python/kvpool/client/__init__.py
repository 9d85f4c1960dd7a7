"""Typed clients of the kvpool services, for engines and tools."""
