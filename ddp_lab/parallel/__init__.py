"""The data-parallel core: works in a notebook, under torchrun and in any script."""
