"""The notebook's reach into ranks while they train: wire, settings, turns."""

__all__ = ["collectives", "interrupts", "ranks", "records", "training", "tuning", "turns", "wire"]
