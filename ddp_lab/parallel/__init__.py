"""The data-parallel core: works in a notebook, under torchrun and in any script."""

__all__ = [
    "core",
    "data_parallel",
    "distributed",
    "hook_check",
    "live",
    "monitoring",
    "observe",
    "observe_shards",
    "replacement",
]
