"""Why ranks make no progress: what each of them does, and who waits for whom."""

__all__ = [
    "backwards",
    "calls",
    "crashes",
    "dumps",
    "flight_recorder",
    "flights",
    "hang_report",
    "hangs",
    "rank_state",
    "sharded_methods",
    "stacks",
    "torch_calls",
]
