"""Dense arrays of what happened when, by step, rank and bucket."""
