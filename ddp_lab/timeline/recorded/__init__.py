"""Recorded runs: reading, merging, replaying, and exporting to other tools."""

__all__ = ["chrome_trace", "ends", "journal_messages", "merge", "player", "saved"]
