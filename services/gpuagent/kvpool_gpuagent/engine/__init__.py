"""Sessions of engine ranks: what they ask, and what runs for them. Awaits; touches nothing but ports."""
