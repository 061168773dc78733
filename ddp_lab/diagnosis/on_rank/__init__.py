"""What a rank answers when it is examined: where it is, and which collectives it has entered."""

__all__ = ["doctor_page", "examine", "own_collectives", "script"]
