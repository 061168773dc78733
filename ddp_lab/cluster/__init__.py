"""A cluster of ranks: its members, its processes, the cells that run on it."""
