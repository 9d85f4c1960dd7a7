"""Connectors: what lets an inference engine share prefixes. Each imports its engine only when it is used."""
