"""A cell on a rank: its text and values, what it prints, asks for and raises."""
