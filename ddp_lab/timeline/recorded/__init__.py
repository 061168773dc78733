"""Runs in files: read, joined, played, written for other tools."""
