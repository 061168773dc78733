"""`ddp-lab`: the commands."""
