"""Why ranks make no progress: what each of them does, and who waits for whom."""

__all__ = [
    "backwards",
    "calls",
    "command",
    "crashes",
    "dumps",
    "flight_recorder",
    "flights",
    "hang_report",
    "hangs",
    "rank_state",
    "sharded_methods",
    "sources",
    "stacks",
    "torch_calls",
]
