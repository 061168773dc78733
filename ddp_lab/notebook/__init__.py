"""The IPython extension: %cluster, %%distributed, completion."""
