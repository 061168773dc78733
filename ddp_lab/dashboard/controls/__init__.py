"""The dashboard's controls of a training: buckets, faults, breakpoints, gradients, predictions."""

__all__ = ["collectives", "controls", "inspection", "what_if"]
