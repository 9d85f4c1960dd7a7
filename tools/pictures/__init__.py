"""The README's pictures and the figures beside them: `python -m tools.pictures` writes all of them."""
