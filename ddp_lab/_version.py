"""The version, for whoever must not import the package's public names."""

__version__ = "0.1.0"
