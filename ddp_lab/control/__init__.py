"""The client's access to ranks while they train: wire, settings, A/B tests."""

__all__ = ["ab_trials", "collectives", "interrupts", "ranks", "records", "training", "tuning", "wire"]
