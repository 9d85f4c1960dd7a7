"""To come."""

PHASES = {}
