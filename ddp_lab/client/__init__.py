"""Notebook side: clusters, cells, outputs and timelines. Never imports torch."""
