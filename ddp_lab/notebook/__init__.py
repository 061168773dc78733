"""The IPython extension: %cluster, %%distributed, completion; and cells as scripts (`scripts`)."""

__all__ = ["scripts"]
