"""One cell on some ranks, from its text to its values or its error."""

__all__ = ["doctor", "failures", "front_end", "run", "variables"]
