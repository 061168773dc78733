"""Why ranks do not come on: what each of them does, and who waits for whom."""

__all__ = ["calls", "flight_recorder", "flights", "hangs", "rank_state"]
