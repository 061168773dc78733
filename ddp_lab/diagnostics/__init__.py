"""Why ranks make no progress: what each of them does, and who waits for whom."""

__all__ = ["calls", "flight_recorder", "flights", "hangs", "rank_state"]
