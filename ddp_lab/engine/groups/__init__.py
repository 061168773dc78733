"""A rank's process groups: known with their sockets, freed, built again."""

__all__ = ["registry", "rejoin"]
