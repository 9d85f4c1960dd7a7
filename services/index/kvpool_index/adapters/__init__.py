"""Where the index keeps what it knows: in this process, or in Redis."""
