"""What a node does with the index: its lease, announcements and comparisons, and a replica of the map."""
