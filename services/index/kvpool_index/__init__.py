"""The index service: how much of a chain exists and where, who is alive, and where new chunks should go."""
