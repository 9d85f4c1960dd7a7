"""The pagestore's ways to the world, one driver each."""
