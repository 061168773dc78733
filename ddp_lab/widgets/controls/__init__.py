"""What a dashboard can ask of a training: other buckets, faults, breakpoints, gradients, predictions."""
