"""The `kvpool` command."""
