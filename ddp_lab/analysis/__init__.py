"""From times to statements: what happened in steps that were recorded. Pure functions on numpy arrays."""
