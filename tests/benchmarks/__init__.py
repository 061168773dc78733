"""Measurements for whoever changes ddp_lab; those that answer a user's question are in `ddp-lab bench`."""
