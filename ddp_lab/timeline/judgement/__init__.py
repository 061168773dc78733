"""Which steps count, what they say, and in which words."""
