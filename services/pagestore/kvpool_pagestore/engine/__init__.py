"""The engine: what sessions, control calls and page streams ask for, carried out on one event loop."""
