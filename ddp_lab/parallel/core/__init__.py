"""What every model of ours needs: parameters, buckets, buffers, comm hooks, and what ranks agree on."""
