"""What the events mean: overlap, waits, stragglers. Pure functions on numpy arrays; no torch, no widgets."""
