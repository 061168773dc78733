"""`ddp-lab bench`: benchmarks, one module each with a `main(argv) -> int`."""

__all__: list[str] = []
