"""OpenTelemetry behind kvpool.core.tracing. Imported, and paid for, only where the environment asks for it."""
