"""What every model of ours needs: parameters, buckets, buffers, comm hooks, and what ranks agree on."""

__all__ = ["adaptation", "agreement", "arguments", "buckets", "comm_hooks", "outputs", "process_groups", "synchronizer"]
