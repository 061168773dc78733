"""From times to figures: which of them may be shown, in tables and pictures."""
