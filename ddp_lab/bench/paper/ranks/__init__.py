"""What the ranks of each figure do."""
