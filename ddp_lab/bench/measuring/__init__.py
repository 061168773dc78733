"""Processes, groups and links made anew, and what is measured on them in turns."""
