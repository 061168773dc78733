"""What-if questions about sharding: the input of `ddp_lab.simulation.sharding` from a timeline, and the answers."""

__all__ = ["what_if", "workload"]
