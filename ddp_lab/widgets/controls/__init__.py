"""What a dashboard can ask of a training: other buckets, faults, breakpoints, gradients, predictions."""

__all__ = ["collectives", "controls", "inspection", "what_if"]
