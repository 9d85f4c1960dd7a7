"""Decisions of the pagestore: no I/O, no clock, no asyncio."""
