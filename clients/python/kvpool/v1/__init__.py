"""Generated from proto/kvpool/v1; never edited by hand."""
