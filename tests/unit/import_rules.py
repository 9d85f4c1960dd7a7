"""The table of who may import what, as CONTRIBUTING.md tells it; test_import_rules holds the code to it."""
