"""The client's access to ranks while they train: wire, settings, A/B tests."""

__all__ = ["collectives", "examination", "interrupts", "ranks", "records", "training", "tuning", "turns", "wire"]
