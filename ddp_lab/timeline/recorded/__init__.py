"""Runs in files: read, joined, played, written for other tools."""

__all__ = ["chrome_trace", "journal_messages", "merge", "player", "saved"]
