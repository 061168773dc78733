"""The IPython extension: %cluster, %%distributed, completion."""

__all__: list[str] = []
