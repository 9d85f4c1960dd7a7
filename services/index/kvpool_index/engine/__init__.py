"""What the index does: one module for each concern, wired by `index.IndexEngine`."""
