"""`ddp-lab bench`: side-by-side measurements, one module each with a `main(argv) -> int`."""

__all__: list[str] = []
