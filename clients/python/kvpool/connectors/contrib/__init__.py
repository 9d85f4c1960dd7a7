"""Connectors for engines that are checked against a recorded interface, not against the engine itself."""
